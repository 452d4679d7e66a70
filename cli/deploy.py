"""`svdq deploy`: install the systemd units in cli/systemd, with an environment file for this installation."""

import importlib.util
import os
import pwd
import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import click

from svdq.cli.formatting import echo
from svdq.cli.option_types import GivenPath
from svdq.pipeline.errors import InputError, how_to_install

SYSTEM_HOME = Path("/var/lib/svdq")
REDIS, WATCH, SERVE = "svdq-redis.service", "svdq-watch.service", "svdq-serve.service"


@click.group()
def deploy() -> None:
    """Install the units that an init system needs to run svdq on this machine."""


@deploy.command()
@click.option("--user", "scope", flag_value="user", help="For your own systemd; needs no further privileges.")
@click.option("--system", "scope", flag_value="system", help="For the machine's systemd, run as a separate user.")
@click.option("--install", is_flag=True, help="Install the files instead of printing them.")
@click.option("--watch", "inbox", type=GivenPath(), help="Also watch this folder for photos.")
@click.option("--serve", is_flag=True, help="Also serve the web page and the API, on 127.0.0.1:8765.")
@click.option("--run-as", metavar="NAME", default="svdq", show_default=True, help="With --system: user to run as.")
@click.option("--force", is_flag=True, help="Overwrite files that differ.")
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED)
def systemd(
    scope: str | None,
    install: bool,
    inbox: Path | None,
    serve: bool,
    run_as: str,
    force: bool,
    worker_options: tuple[str, ...],
) -> None:
    """Print or install systemd units.

    There are units for Redis, a worker, a nightly timer, a watched folder, and the web page. They are the same
    everywhere. An environment file beside them has the paths of this installation and the
    settings from the environment and svdq.toml, except secrets. Arguments after `--` are options of `svdq worker`. The
    command neither enables nor starts a unit; it prints the commands that do.

    \b
    Examples:
      svdq deploy systemd --user                              print units for this user
      svdq deploy systemd --user --install --watch ~/inbox
      sudo svdq deploy systemd --system --install
      svdq deploy systemd --system -- --warmup 1024x576x25    options of svdq worker
    """
    from svdq.cli.worker import worker
    from svdq.producer.settings import absolute

    if scope is None:
        raise click.UsageError("Give --user or --system.")
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", run_as, re.ASCII):  # systemd takes an empty name for root
        raise InputError(f"--run-as {run_as!r} is not the name of a user, such as svdq.")
    root = click.get_current_context().find_root()
    worker.make_context("worker", list(worker_options), parent=root)  # raises for a wrong option
    is_system = scope == "system"
    inbox = None if inbox is None else absolute(inbox)
    if install and not is_system and inbox is not None and not inbox.is_dir():  # for the machine, a step makes it
        raise InputError(f"There is no folder {str(inbox)!r} to watch; make it first.")
    if install and serve and importlib.util.find_spec("uvicorn") is None:
        raise InputError(f"svdq serve needs packages that are not installed; {how_to_install('serve')}.")
    environment, secrets = _environment(is_system)
    environment |= {"INBOX": str(inbox)} if inbox is not None else {}
    environment |= {"SERVE_OPTIONS": ""} if serve else {}
    environment["WORKER_OPTIONS"] = shlex.join(worker_options)
    home, is_embedded = Path(environment["SVDQ_HOME"]), "SVDQ_REDIS_URL" in environment
    storage = environment.get("SVDQ_STORAGE", "")
    paths = [home, *([Path(storage)] if storage.startswith("/") else []), *([inbox] if inbox is not None else [])]
    paths = [path for path in paths if path == home or not path.is_relative_to(home)]

    config = Path("/etc") if is_system else Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    folder = config / "systemd" / scope
    optional = {REDIS: is_embedded, WATCH: inbox is not None, SERVE: serve}
    left_out = {name for name, is_wanted in optional.items() if not is_wanted}
    units = {name: text for name, text in _units(is_system) if name.parts[0].removesuffix(".d") not in left_out}
    contents = {folder / name: text for name, text in units.items()}
    contents[folder / "svdq-.service.d/local.conf"] = _drop_in(paths, run_as if is_system else None)
    lines = [f"{name}={_quoted(value)}\n" for name, value in environment.items()]
    contents[config / "svdq" / "systemd.env"] = "".join(lines)
    if not install:
        for path, text in contents.items():
            echo(f"# {path}", *text.splitlines(), "")
        return
    _install(contents, force=force)
    steps = [f"# write {', '.join(secrets)} into {config / 'svdq' / 'environment'}, with mode 600"] if secrets else []
    steps += _system_steps(run_as, paths) if is_system else ["loginctl enable-linger   # keeps services after logout"]
    systemctl = f"systemctl{'' if is_system else ' --user'}"
    enable = " ".join([f"{systemctl} enable --now", *(name for name, is_wanted in optional.items() if is_wanted)])
    steps += [
        f"{systemctl} daemon-reload",
        f"{enable} svdq-worker.service   # renders day and night, or",
        f"{enable} svdq-night.timer   # only at night",
    ]
    echo("", "Next:", *(f"  {step}" for step in steps))


def _environment(is_system: bool) -> tuple[dict[str, str], list[str]]:
    """Collect the variables of the units, and the names of those that are secret and left out."""
    from svdq.producer.embedded_redis import MAX_SOCKET_PATH
    from svdq.producer.settings import ENV_PREFIX, SECRETS, without_secrets
    from svdq.producer.settings_loader import FILE_NAME, absolute_model, load_settings, origins

    home = SYSTEM_HOME if is_system and origins()["home"] == "default" else None
    settings = load_settings(home=home)
    found = origins(home=home)
    program = _program()
    environment = {"PATH": f"{program.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    environment["SVDQ_HOME"] = str(settings.home)
    if is_system:
        environment["HOME"] = str(settings.home)  # for the caches of torch, CUDA and the model hub
    own_file = str(settings.home / FILE_NAME)  # the services read it themselves
    secrets = []
    if settings.redis_url is None:
        socket = settings.home / "redis" / "redis.sock"
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
            raise InputError(f"{str(settings.home)!r} is too long for a socket's path; set SVDQ_HOME to a shorter one.")
        # An explicit URL keeps other services from starting another server while this one restarts.
        environment["SVDQ_REDIS_URL"] = f"unix://{quote(str(socket))}"
    elif found["redis_url"] != own_file:
        secrets.append(f"{ENV_PREFIX}REDIS_URL")
    for name, origin in found.items():
        if name in {"home", "redis_url"} or origin in {"default", own_file}:
            continue
        text = str(getattr(settings, name))
        if name == "model":
            text = absolute_model(text)
        if without_secrets(text) == text and name not in SECRETS:
            environment[f"{ENV_PREFIX}{name.upper()}"] = text
        else:
            secrets.append(f"{ENV_PREFIX}{name.upper()}")
    return environment, secrets


def _program() -> Path:
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("svdq", path=scripts) or shutil.which("svdq")
    if found is None:
        raise InputError("There is no svdq program for systemd to start; install svdq with pip.")
    return Path(found).absolute()


def _units(is_system: bool) -> Iterator[tuple[Path, str]]:
    folder = Path(__file__).parent / "systemd"
    for path in sorted(folder.rglob("*.*")):
        if path.is_file() and (is_system or not path.name.startswith("system")):
            yield path.relative_to(folder), path.read_text(encoding="utf-8")


def _drop_in(paths: Sequence[Path], user: str | None) -> str:
    """Return the drop-in of all services with this installation's folders and, for the machine, its user."""
    words = " ".join(_quoted(str(path).replace("%", "%%")) for path in paths)
    lines = ["[Unit]", "# A disk that is mounted late is waited for.", f"RequiresMountsFor={words}"]
    if user is not None:
        # A leading `-` lets the service start without the folder.
        writable = " ".join(_quoted("-" + str(path).replace("%", "%%")) for path in paths)
        lines += ["", "[Service]", f"User={user}", f"ReadWritePaths={writable}"]
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    if text and not set(text) & set(" \t\n\"'\\;#$`"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _install(contents: dict[Path, str], *, force: bool) -> None:
    """Write all files, or none and raise InputError if one would overwrite a different file."""
    from svdq.producer.files import write_file

    try:
        existing = {path: path.read_text(encoding="utf-8") for path in contents if path.exists()}
        for path in contents:
            path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"The files cannot be written ({error}); check the rights of the folders.") from error
    changed = [str(path) for path, text in existing.items() if text != contents[path]]
    if changed and not force:
        raise InputError(
            f"{', '.join(changed)} would change; compare without --install, or overwrite with --force. Put your own "
            "changes into a drop-in with systemctl edit."
        )
    for path, text in contents.items():
        is_new = existing.get(path) != text
        if is_new:
            write_file(path, [text])
        echo(f"{path}: {'written' if is_new else 'unchanged'}")


def _system_steps(user: str, paths: Sequence[Path]) -> list[str]:
    """List the commands that create the user and the folders that systemd does not create."""
    home, steps = paths[0], []
    try:
        pwd.getpwnam(user)
    except KeyError:
        steps.append(f"useradd --system --home-dir {shlex.quote(str(home))} --shell /usr/sbin/nologin {user}")
    missing = [path for path in paths if path != SYSTEM_HOME and not path.is_dir()]
    return steps + [f"install -d -o {user} {shlex.quote(str(path))}" for path in missing]
