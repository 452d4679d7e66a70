"""Names for temporary files that identify their process, so that files of killed processes can be removed."""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from svdq.producer.process_identity import is_running, scope, start_of

#: Age in seconds from which a temporary file counts as abandoned if its process cannot be checked from here.
ABANDONED_S = 24 * 60 * 60

#: `<scope>@<process id>.<start of the process>-<random>`.
_NAME = re.compile(r"(?P<scope>[0-9a-f]{12}|x[0-9a-f]+)@(?P<pid>\d{1,10})\.(?P<start>\d{0,20})-[0-9a-f]{16}(?:\.old)?")
#: Names by earlier versions: `<host>@<process id>-<random>`.
_OLD_NAME = re.compile(r"[^@/]+@\d{1,10}-[0-9a-f]{16}(?:\.old)?")


def temporary_name(prefix: str = "") -> str:
    """Return an unused name; `sweep` removes only files and folders with such names."""
    pid = os.getpid()
    return f"{prefix}{scope()}@{pid}.{start_of(pid) or ''}-{secrets.token_hex(8)}"


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
    """Return whether the process in a name is running; None if that cannot be checked here."""
    found = _NAME.fullmatch(name)
    return None if found is None else is_running(int(found["pid"]), found["start"], found["scope"])
