"""Units of systemd, made of `templates/` for one installation. Pure but for reading them; knows no settings.

A template is a unit with placeholders. A line that begins with the name of a condition and a colon, such as `system: `,
is only for units of which that holds; the conditions are in `_make_unit`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal
from urllib.parse import quote

Scope = Literal["system", "user"]

SYSTEM_FOLDER = Path("/etc/systemd/system")
#: systemd makes folders below this one, with the right owner, where a unit names them.
STATE_FOLDER = Path("/var/lib")
#: Folders that `ProtectHome=yes` hides.
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))

REDIS, WORKER, WATCH = "svdq-redis.service", "svdq-worker.service", "svdq-watch.service"
NIGHT, NIGHT_TIMER = "svdq-night.service", "svdq-night.timer"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What the units are for."""

    #: Units of the machine, or of one person.
    scope: Scope
    #: The program.
    svdq: Path
    #: SVDQ_HOME of all of them.
    home: Path
    #: Who runs units of the machine.
    user: str = "svdq"
    #: Whether the embedded Redis server is theirs to run.
    embedded: bool = True
    #: Folder whose photos become jobs; None for no such unit.
    inbox: Path | None = None
    #: Folders besides home and inbox that they write to.
    writable: tuple[Path, ...] = ()
    #: Other settings, none of them secret.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Names of the settings that are secret: they stand in the environment file, which a person writes.
    secrets: tuple[str, ...] = ()
    #: Options of `svdq worker`.
    worker_options: tuple[str, ...] = ()
    #: NVIDIA's program that makes the device files of GPUs, where the machine has it.
    nvidia_modprobe: str | None = None


def make_units(installation: Installation) -> dict[str, str]:
    """Make all units of an installation.

    Returns:
        The text of each by its file name.
    """
    names = [REDIS] if installation.embedded else []
    names += [WORKER, NIGHT, NIGHT_TIMER]
    names += [WATCH] if installation.inbox is not None else []
    return {name: _make_unit(name, installation) for name in names}


def folders_to_make(installation: Installation) -> list[Path]:
    """Name the folders that units of the machine write to and that systemd does not make itself."""
    return _writable(WATCH, installation) if installation.scope == "system" else []


def word(text: object) -> str:
    """Write one word of a unit's line, so that systemd reads it as it is: no specifiers, no splitting."""
    plain = str(text).replace("\\", "\\\\").replace("%", "%%")
    if plain and not any(character.isspace() or character in "\"';#" for character in plain):
        return plain
    quoted = plain.replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{quoted}"'


def argument(text: object) -> str:
    """Write one word of a command line, where systemd replaces variables as well."""
    return word(text).replace("$", "$$")


def _make_unit(name: str, installation: Installation) -> str:
    writable = _writable(name, installation)
    values = {**_values(installation), "writable": " ".join(map(word, writable))}
    holds: dict[str, bool] = {
        "system": installation.scope == "system",
        "user": installation.scope == "user",
        "embedded": installation.embedded,
        "gpu": installation.scope == "system" and installation.nvidia_modprobe is not None,
        "state": installation.scope == "system" and _state_directory(installation) != "",
        "writable": installation.scope == "system" and writable != [],
    }
    values["hardening"] = _fill("hardening.in", values, holds).strip()
    return _fill(f"{name}.in", values, holds)


def _values(installation: Installation) -> dict[str, str]:
    home = installation.home
    environment = {"SVDQ_HOME": str(home), **installation.environment}
    if installation.scope == "system":
        # Where torch, CUDA and the model hub keep what they have fetched and compiled.
        environment["HOME"] = str(home)
    if installation.embedded:
        # Named, so that no other unit starts a server of its own when this one is restarted.
        environment["SVDQ_REDIS_URL"] = f"unix://{quote(str(home / 'redis' / 'redis.sock'))}"
    lines = [f"Environment={word(f'{name}={value}')}" for name, value in environment.items()]
    lines += ["# Settings for this machine, secrets above all; with mode 600.", "EnvironmentFile=-%E/svdq/environment"]
    paths = [installation.svdq, home, *_writable(WATCH, installation)]
    return {
        "svdq": argument(installation.svdq),
        "home_setting": word(f"SVDQ_HOME={home}"),
        "environment": "\n".join(lines),
        "user": installation.user,
        "state_directory": word(_state_directory(installation)),
        "pid_file": str(home / "redis" / "redis.pid").replace("%", "%%"),
        "report": argument(home / "last-night.json"),
        "inbox": argument(installation.inbox),
        "inbox_path": word(installation.inbox),
        "worker_options": " ".join(map(argument, installation.worker_options)),
        "nvidia_modprobe": str(installation.nvidia_modprobe),
        "protect_home": "read-only" if any(_is_below(path, HOMES) for path in paths) else "yes",
        "target": "default.target" if installation.scope == "user" else "multi-user.target",
    }


def _state_directory(installation: Installation) -> str:
    """Give the home as seen from /var/lib, or "" where it is elsewhere."""
    is_state = installation.home != STATE_FOLDER and _is_below(installation.home, (STATE_FOLDER,))
    return str(installation.home.relative_to(STATE_FOLDER)) if is_state else ""


def _writable(name: str, installation: Installation) -> list[Path]:
    """Give the folders that a unit has to name as writable."""
    home = [] if _state_directory(installation) else [installation.home]
    others = [] if name == REDIS else [*installation.writable]
    if name == WATCH and installation.inbox is not None:
        others.append(installation.inbox)
    return [*home, *(path for path in others if not path.is_relative_to(installation.home))]


def _is_below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _fill(name: str, values: Mapping[str, str], holds: Mapping[str, bool]) -> str:
    template = (files("svdq.cli.systemd") / "templates" / name).read_text(encoding="utf-8")
    lines = []
    for line in template.splitlines():
        condition, separator, rest = line.partition(": ")
        if not separator or condition not in holds:
            lines.append(line)
        elif holds[condition]:
            lines.append(rest)
    return "".join(f"{line.rstrip()}\n" for line in Template("\n".join(lines)).substitute(values).splitlines())
