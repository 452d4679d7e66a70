"""`svdq deploy`: what an init system needs to run svdq on this machine."""

import os
import pwd
import shlex
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import echo
from svdq.pipeline.errors import InputError

if TYPE_CHECKING:
    from svdq.cli.systemd.units import Installation, Scope

SYSTEMD_EXAMPLES = """\b
Examples:
  svdq deploy systemd --user                              print units for this user
  svdq deploy systemd --user --install --watch ~/inbox
  sudo svdq deploy systemd --system --install
  svdq deploy systemd --system -- --warmup 1024x576x25    options of svdq worker
"""


@click.group()
def deploy() -> None:
    """Write what an init system needs to run svdq on this machine."""


@deploy.command(epilog=SYSTEMD_EXAMPLES)
@click.option("--user", "scope", flag_value="user", help="For your own systemd, which needs no other rights.")
@click.option("--system", "scope", flag_value="system", help="For the machine's systemd, as a user of its own.")
@click.option("--print/--install", "only_print", default=True, help="Print the units [default], or put them in place.")
@click.option("--watch", "inbox", type=click.Path(path_type=Path), help="Watch this folder for photos, too.")
@click.option("--own-redis", is_flag=True, help="A server of your own [default: where SVDQ_REDIS_URL is set].")
@click.option("--run-as", metavar="NAME", default="svdq", show_default=True, help="With --system: whose processes.")
@click.option("--folder", type=click.Path(path_type=Path), help="Install there [default: where systemd looks].")
@click.option("--force", is_flag=True, help="Write over units that differ.")
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED)
def systemd(
    scope: "Scope | None",
    only_print: bool,
    inbox: Path | None,
    own_redis: bool,
    run_as: str,
    folder: Path | None,
    force: bool,
    worker_options: tuple[str, ...],
) -> None:
    """Print or install units of systemd: Redis, worker, a nightly timer, and a watched folder.

    They have the paths of this installation, and the settings that the environment or svdq.toml has here, but for
    secrets. What follows `--` are options of `svdq worker`. No unit is enabled or started: the commands that do so are
    printed.
    """
    from svdq.cli.systemd.units import SYSTEM_FOLDER, make_units
    from svdq.cli.worker import worker

    if scope is None:
        raise click.UsageError("Give --user or --system.")
    worker.make_context("svdq worker", list(worker_options))  # which tells of a wrong one
    found = _installation(scope, inbox, own_redis, run_as, worker_options)
    units = make_units(found)
    folder = folder or (SYSTEM_FOLDER if scope == "system" else _config_folder() / "systemd" / "user")
    if only_print:
        for name, text in units.items():
            for line in (f"# {folder / name}", *text.splitlines(), ""):
                echo(line)
        return
    _install(units, folder, force=force)
    for line in _next_steps(found):
        echo(line)


def _config_folder() -> Path:
    """Where this user's programs keep their settings, as systemd understands it."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _installation(
    scope: "Scope", inbox: Path | None, own_redis: bool, run_as: str, worker_options: tuple[str, ...]
) -> "Installation":
    """Put together what is installed here and how it is set.

    Raises:
        InputError: a setting is not allowed, or what is asked for cannot work under systemd.
    """
    from svdq.cli.systemd.units import Installation
    from svdq.producer.embedded_redis.socket_path import MAX_SOCKET_PATH
    from svdq.producer.settings import ENV_PREFIX, FILE_NAME, Settings, origins, without_secrets

    home = Path("/var/lib/svdq") if scope == "system" and origins()["home"] == "default" else None
    settings = Settings.load(home=home)
    embedded = not own_redis and settings.redis_url is None
    if embedded and len(os.fsencode(settings.home / "redis" / "redis.sock")) > MAX_SOCKET_PATH:
        raise InputError(
            f"The path of {str(settings.home)!r} is too long for a socket; set SVDQ_HOME to a shorter one."
        )
    environment = {}
    there = str(settings.home / FILE_NAME)
    found = origins(home=home)
    secrets = [] if embedded or found["redis_url"] == there else [f"{ENV_PREFIX}REDIS_URL"]
    for name, origin in found.items():
        value = getattr(settings, name)
        # What stands in the home's own file, units read there themselves.
        if name in {"home", "redis_url"} or origin in {"default", there}:
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        if without_secrets(text) == text:
            environment[f"{ENV_PREFIX}{name.upper()}"] = text
        else:
            secrets.append(f"{ENV_PREFIX}{name.upper()}")
    return Installation(
        scope=scope,
        svdq=_program(),
        home=settings.home,
        user=run_as,
        embedded=embedded,
        inbox=None if inbox is None else inbox.expanduser().absolute(),
        writable=() if "://" in settings.storage else (Path(settings.storage),),
        environment=environment,
        secrets=tuple(secrets),
        worker_options=worker_options,
        nvidia_modprobe=shutil.which("nvidia-modprobe"),
    )


def _program() -> Path:
    beside = Path(sysconfig.get_path("scripts")) / "svdq"
    found = str(beside) if beside.exists() else shutil.which("svdq")
    if found is None:
        raise InputError("There is no program svdq to start; install it with pip, so that systemd has one to call.")
    return Path(found).absolute()


def _install(units: dict[str, str], folder: Path, *, force: bool) -> None:
    """Write units into a folder: all of them, or none when one there is another's work.

    Raises:
        InputError: one differs from what is there, or cannot be written.
    """
    from svdq.producer.results.pages import write

    try:
        there = {name: (folder / name).read_text(encoding="utf-8") for name in units if (folder / name).exists()}
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"The folder {str(folder)!r} cannot be used ({error}); give another --folder.") from error
    changed = [name for name, text in there.items() if text != units[name]]
    if changed and not force:
        raise InputError(
            f"{', '.join(changed)} in {str(folder)!r} would change; look with --print, and write over with --force. "
            "Changes of your own outlive that in a drop-in: systemctl edit."
        )
    for name, text in units.items():
        if there.get(name) == text:
            echo(f"{folder / name}: as it should be")
        else:
            write(folder / name, [text])
            echo(f"{folder / name}: written")


def _next_steps(found: "Installation") -> list[str]:
    """Say what a person does next, in the order in which it works."""
    from svdq.cli.systemd.units import NIGHT_TIMER, REDIS, WATCH, WORKER, folders_to_make

    systemctl = "systemctl" if found.scope == "system" else "systemctl --user"
    config = Path("/etc") if found.scope == "system" else _config_folder()
    steps = []
    if found.scope == "system" and not _is_user(found.user):
        steps.append(
            f"useradd --system --home-dir {shlex.quote(str(found.home))} --shell /usr/sbin/nologin {found.user}"
        )
    steps += [
        f"install -d -o {found.user} {shlex.quote(str(path))}" for path in folders_to_make(found) if not path.is_dir()
    ]
    if found.secrets:
        steps.append(f"# write {', '.join(found.secrets)} into {config / 'svdq' / 'environment'}, with mode 600")
    if found.scope == "user":
        steps.append("loginctl enable-linger   # so that they run while you are logged out")
    others = [*([REDIS] if found.embedded else []), *([WATCH] if found.inbox is not None else [])]
    steps.append(f"{systemctl} daemon-reload")
    steps.append(f"{systemctl} enable --now {' '.join([*others, WORKER])}   # renders day and night, or")
    steps.append(f"{systemctl} enable --now {' '.join([*others, NIGHT_TIMER])}   # by night only")
    return ["", "Next:", *(f"  {step}" for step in steps)]


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
