"""`svdq deploy`: write the units that an init system needs to run svdq on this machine."""

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
    """Write the units that an init system needs to run svdq on this machine."""


@deploy.command(epilog=SYSTEMD_EXAMPLES)
@click.option("--user", "scope", flag_value="user", help="For your own systemd; needs no further privileges.")
@click.option("--system", "scope", flag_value="system", help="For the machine's systemd, run as a separate user.")
@click.option("--print/--install", "only_print", default=True, help="Print the units [default], or install them.")
@click.option("--watch", "inbox", type=click.Path(path_type=Path), help="Also watch this folder for photos.")
@click.option("--own-redis", is_flag=True, help="Use your own Redis server [default: where SVDQ_REDIS_URL is set].")
@click.option("--run-as", metavar="NAME", default="svdq", show_default=True, help="With --system: user to run as.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder to install to [default: systemd's].")
@click.option("--force", is_flag=True, help="Overwrite units that differ.")
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
    """Print or install systemd units: Redis, worker, a nightly timer, and a watched folder.

    The units contain the paths of this installation and the settings from the environment and svdq.toml, except
    secrets. Arguments after `--` are options of `svdq worker`. The command neither enables nor starts a unit; it prints
    the commands that do.
    """
    from svdq.cli.systemd.units import SYSTEM_FOLDER, make_units
    from svdq.cli.worker import worker

    if scope is None:
        raise click.UsageError("Give --user or --system.")
    worker.make_context("svdq worker", list(worker_options))  # raises for a wrong option
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
    """Return the folder of the user's configuration files, as systemd determines it."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _installation(
    scope: "Scope", inbox: Path | None, own_redis: bool, run_as: str, worker_options: tuple[str, ...]
) -> "Installation":
    """Collect the paths and settings of this installation.

    Raises:
        InputError: a setting is not allowed, or the request cannot work under systemd.
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
        # The units read the settings in the home's own file themselves.
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
        raise InputError("There is no svdq program for systemd to start; install svdq with pip.")
    return Path(found).absolute()


def _install(units: dict[str, str], folder: Path, *, force: bool) -> None:
    """Write units into a folder: all of them, or none if one would overwrite a different file.

    Raises:
        InputError: a unit differs from an existing file, or cannot be written.
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
            f"{', '.join(changed)} in {str(folder)!r} would change; compare with --print, and overwrite with --force. "
            "To keep your own changes, put them in a drop-in with systemctl edit."
        )
    for name, text in units.items():
        if there.get(name) == text:
            echo(f"{folder / name}: unchanged")
        else:
            write(folder / name, [text])
            echo(f"{folder / name}: written")


def _next_steps(found: "Installation") -> list[str]:
    """List the commands that a person runs next, in order."""
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
        steps.append("loginctl enable-linger   # keeps services running after logout")
    others = [*([REDIS] if found.embedded else []), *([WATCH] if found.inbox is not None else [])]
    steps.append(f"{systemctl} daemon-reload")
    steps.append(f"{systemctl} enable --now {' '.join([*others, WORKER])}   # renders day and night, or")
    steps.append(f"{systemctl} enable --now {' '.join([*others, NIGHT_TIMER])}   # only at night")
    return ["", "Next:", *(f"  {step}" for step in steps)]


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
