"""Names for temporary files that identify their process, so that files of killed processes can be removed."""

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

#: Age in seconds from which a temporary file counts as abandoned if its process cannot be checked from here.
ABANDONED_S = 24 * 60 * 60

#: `<machine>@<process id>.<start of the process>-<random>`.
_NAME = re.compile(r"(?P<machine>[0-9a-f]{12})@(?P<pid>\d{1,10})\.(?P<start>\d{1,20})-[0-9a-f]{16}(?:\.old)?")
#: Names by earlier versions: `<host>@<process id>-<random>`.
_OLD_NAME = re.compile(r"[^@/]+@\d{1,10}-[0-9a-f]{16}(?:\.old)?")


def temporary_name(prefix: str = "") -> str:
    """Return an unused name; `sweep` removes only files and folders with such names."""
    pid = os.getpid()
    return f"{prefix}{_machine()}@{pid}.{_start_of(pid)}-{secrets.token_hex(8)}"


def sweep(paths: Iterable[Path], prefix: str = "", abandoned_s: float = ABANDONED_S) -> None:
    """Remove the files and folders of processes that have ended; ignore names that are not from `temporary_name`.

    Args:
        paths: files and folders with any names.
        prefix: prefix of the names.
        abandoned_s: age in seconds from which files are removed whose process cannot be checked from here.
    """
    for path in paths:
        name = path.name.removeprefix(prefix)
        if not path.name.startswith(prefix) or not (_NAME.fullmatch(name) or _OLD_NAME.fullmatch(name)):
            continue
        with contextlib.suppress(OSError):  # its owner has just removed it
            is_alive = _is_alive(name)
            if is_alive is None:
                is_alive = time.time() - path.stat().st_mtime <= abandoned_s
            if not is_alive:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _is_alive(name: str) -> bool | None:
    """Return whether the process in a name is running; None if unknown: it is on another machine or container."""
    found = _NAME.fullmatch(name)
    if found is None or found["machine"] != _machine():
        return None
    pid = int(found["pid"])
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return None
    return _start_of(pid) in (found["start"], "0")


@cache
def _machine() -> str:
    """Identify the scope of process ids: one boot of a machine and, on Linux, one PID namespace (a container).

    A host name is not enough: two machines may have the same one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        machine = str(uuid.getnode())
    return hashlib.sha256(machine.encode()).hexdigest()[:12]


def _start_of(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; "0" if unknown."""
    try:
        # The name, in parentheses, may contain anything; the start is field 22.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
