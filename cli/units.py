"""The systemd units of this installation: the files in cli/systemd, and two more that are made here.

For `svdq deploy` and `svdq setup`.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from svdq.cli.formatting import echo
from svdq.cli.worker_process import BESIDE_A_PAGE
from svdq.pipeline.errors import InputError, reason_of

if TYPE_CHECKING:
    from svdq.producer.settings import Settings

Scope = Literal["user", "system"]
SYSTEM_HOME = Path("/var/lib/svdq")
REDIS, WATCH, SERVE = "svdq-redis.service", "svdq-watch.service", "svdq-serve.service"
NIGHT = "svdq-night.timer"
DROP_IN = Path("svdq-.service.d", "local.conf")
LINGER = "loginctl enable-linger"
BOOTED = Path("/run/systemd/system")
SYSTEMCTL_S = 120.0  # services stop within 30 s, Redis within 60 s


@dataclass(frozen=True, kw_only=True)
class Units:
    """What is to be installed."""

    contents: dict[Path, str]
    services: list[str]  # units besides those of the worker
    folders: list[Path]  # that services write to, the home first
    secrets: list[str]  # variables that are not in the files


def units_for(
    scope: Scope, inbox: Path | None = None, run_as: str | None = None, worker_options: Sequence[str] = (), *,
    serve: bool = False,
) -> Units:  # fmt: skip
    """Return the units with the settings of this process; raises InputError for a home that no server can use."""
    from svdq.producer.settings import local_folder
    from svdq.producer.settings_loader import load_settings, origins

    is_system = scope == "system"
    home = SYSTEM_HOME if is_system and origins()["home"] == "default" else None
    settings, found = load_settings(home=home), origins(home=home)
    environment, secrets = _environment(settings, found)
    if is_system:
        environment["HOME"] = str(settings.home)  # for the caches of torch, CUDA and the model hub
    environment |= {"INBOX": str(inbox)} if inbox is not None else {}
    environment |= {"SERVE_OPTIONS": ""} if serve else {}
    if serve and settings.on_demand is None:
        environment["SVDQ_ON_DEMAND"] = BESIDE_A_PAGE
    environment["WORKER_OPTIONS"] = shlex.join(worker_options)
    home, is_embedded = settings.home, "SVDQ_REDIS_URL" in environment
    others = (path for path in (local_folder(settings.storage), inbox) if path is not None)
    paths = [home, *(path for path in others if not path.is_relative_to(home))]

    folder = units_folder(scope)
    optional = {REDIS: is_embedded, WATCH: inbox is not None, SERVE: serve}
    left_out = {name for name, is_wanted in optional.items() if not is_wanted}
    units = {name: text for name, text in _units(is_system) if name.parts[0].removesuffix(".d") not in left_out}
    contents = {folder / name: text for name, text in units.items()}
    contents[folder / DROP_IN] = _drop_in(paths, run_as)
    contents[_environment_file(scope)] = "".join(f"{name}={_quoted(value)}\n" for name, value in environment.items())
    services = [name for name in optional if name not in left_out]
    return Units(contents=contents, services=services, folders=paths, secrets=secrets)


def config_folder(scope: Scope) -> Path:
    """Return the folder that systemd calls %E."""
    if scope == "system":
        return Path("/etc")
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))


def units_folder(scope: Scope) -> Path:
    """Return the folder of the units."""
    return config_folder(scope) / "systemd" / scope


def _environment_file(scope: Scope) -> Path:
    return config_folder(scope) / "svdq" / "systemd.env"


def _environment(settings: "Settings", found: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Collect the variables of the units, and the names of those that are secret and left out."""
    from svdq.producer.embedded_redis import MAX_SOCKET_PATH
    from svdq.producer.settings import ENV_PREFIX, SECRETS, without_secrets
    from svdq.producer.settings_loader import FILE_NAME, absolute_model

    program = installed_program()
    environment = {"PATH": f"{program.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    environment["SVDQ_HOME"] = str(settings.home)
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


def installed_program() -> Path:
    """Return the path of `svdq`, as services start it; raises InputError without one."""
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


def install_files(contents: dict[Path, str], *, force: bool) -> None:
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


def remove_units(scope: Scope, *, force: bool) -> None:
    """Stop and disable the units, and remove the files of `install_files`.

    Raises InputError, and removes nothing, for a unit that is not as svdq has written it, or if systemd refuses.
    """
    folder = units_folder(scope)
    units = {folder / name: text for name, text in _units(is_system=True)}
    own = [path for path in (*units, folder / DROP_IN, _environment_file(scope)) if path.is_file()]
    if not own:
        echo(f"There are no units of svdq in {folder}.")
        return
    try:
        changed = [str(path) for path in own if path in units and path.read_text("utf-8", "replace") != units[path]]
        if changed and not force:
            raise InputError(
                f"{', '.join(changed)} is not as this svdq writes it: changed, or of another version; nothing was "
                "removed. Save what you need, and give --force."
            )
        names = [path.name for path in own if path.parent == folder]
        if is_booted():
            run_systemctl(scope, "disable", "--now", *names)
        for link in (link for name in names for link in folder.glob(f"*.wants/{name}")):
            link.unlink()
        for path in own:
            path.unlink()
            echo(f"{path}: removed")
        for emptied in sorted({path.parent for path in own} - {folder}):
            with contextlib.suppress(OSError):  # it has files of the user
                emptied.rmdir()
    except OSError as error:
        raise InputError(f"The files cannot be removed ({error}); check the rights of the folders.") from error
    if is_booted():
        run_systemctl(scope, "daemon-reload")
    echo("", "Kept: the queue, photos and videos in the home of svdq, and files of your own.")


def is_booted() -> bool:
    """Return whether systemd runs this machine, as sd_booted(3) does."""
    return BOOTED.is_dir()


def run_systemctl(scope: Scope, *arguments: str) -> None:
    """Run systemctl; raises InputError with its reason if it fails."""
    run_program([*systemctl(scope), *arguments])


def run_program(command: Sequence[str]) -> None:
    """Run a program of systemd; raises InputError with its reason if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SYSTEMCTL_S)
        reason = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = reason_of(error)
    if reason:
        raise InputError(f"`{shlex.join(command)}` failed ({reason}); correct that, and run it again.")


def systemctl(scope: Scope) -> list[str]:
    """Return the program that controls the units."""
    return ["systemctl", *(["--user"] if scope == "user" else [])]
