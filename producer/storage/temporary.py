"""Names for temporary files that say which process made them, so that what a killed process leaves can be removed."""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path

#: Seconds after which a temporary file of a process that cannot be checked from here counts as left behind.
ABANDONED_S = 24 * 60 * 60

#: `<machine>@<process id>.<start of the process>-<random>`.
_NAME = re.compile(r"(?P<machine>[0-9a-f]{12})@(?P<pid>\d{1,10})\.(?P<start>\d{1,20})-[0-9a-f]{16}(?:\.old)?")
#: What versions before 0.2 made: `<host>@<process id>-<random>`.
_OLD_NAME = re.compile(r"[^@/]+@\d{1,10}-[0-9a-f]{16}(?:\.old)?")


def temporary_name(prefix: str = "") -> str:
    """Make up a fresh name; `sweep` removes only files and folders with such names."""
    pid = os.getpid()
    return f"{prefix}{_machine()}@{pid}.{_start_of(pid)}-{secrets.token_hex(8)}"


def sweep(paths: Iterable[Path], prefix: str = "", abandoned_s: float = ABANDONED_S) -> None:
    """Remove the files and folders of processes that are gone; leave everything without a name of `temporary_name`.

    Args:
        paths: files and folders with any names.
        prefix: the prefix that the names were given.
        abandoned_s: age from which those are removed whose process cannot be checked from here; in seconds.
    """
    for path in paths:
        name = path.name.removeprefix(prefix)
        if not path.name.startswith(prefix) or not (_NAME.fullmatch(name) or _OLD_NAME.fullmatch(name)):
            continue
        with contextlib.suppress(OSError):  # its owner has just finished with it
            is_alive = _is_alive(name)
            if is_alive is None:
                is_alive = time.time() - path.stat().st_mtime <= abandoned_s
            if not is_alive:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _is_alive(name: str) -> bool | None:
    """Whether the process in a name is running; None when it cannot be known: it is of another machine or container."""
    found = _NAME.fullmatch(name)
    if found is None or found["machine"] != _machine():
        return None
    pid = int(found["pid"])
    try:
        os.kill(pid, 0)  # signal 0 only checks that there is such a process
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return None
    return _start_of(pid) in (found["start"], "0")


@cache
def _machine() -> str:
    """Name what a process id is unique in: one boot of one machine and, on Linux, one namespace (a container) of it.

    The host's name does not do: two machines may have the same one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        machine = str(uuid.getnode())
    return hashlib.sha256(machine.encode()).hexdigest()[:12]


def _start_of(pid: int) -> str:
    """Say when a process was started, in clock ticks since the boot; "0" when that is not known."""
    try:
        # The name, in parentheses, may contain anything; the start is field 22.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
