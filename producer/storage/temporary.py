"""Names for what is temporary, which say whose it is, so that what killed processes leave behind can be removed.

Knows no storage.
"""

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

#: Seconds after which what is temporary counts as left behind, whoever made it.
ABANDONED_S = 24 * 60 * 60


def temporary_name(prefix: str = "") -> str:
    """Make up a fresh name."""
    return f"{prefix}{_here()}@{os.getpid()}-{secrets.token_hex(8)}"  # `@` stands in no host name


def sweep(paths: Iterable[Path], prefix: str = "", abandoned_s: float = ABANDONED_S) -> None:
    """Remove those files and folders whose process is gone, or that are older than `abandoned_s`.

    Args:
        paths: what has names of `temporary_name`, or any others.
        prefix: what the names were given.
        abandoned_s: seconds, or infinity for what a living process may need for days.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # its owner has just finished with it
            if _is_orphan(path.name.removeprefix(prefix)) or time.time() - path.stat().st_mtime > abandoned_s:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _is_orphan(name: str) -> bool:
    host, _, rest = name.partition("@")
    pid = rest.partition("-")[0]
    if host != _here() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _here() -> str:
    """Name what a process id is unique in: a host, and on Linux one namespace (a container) of it."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}.{namespace.stat().st_ino:x}" if namespace.exists() else socket.gethostname()
