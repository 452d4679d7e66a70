"""Handing a file to the desktop, to open it in the program that the user has for it. Knows no jobs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Seconds within which an opener says that it cannot; one that goes on is showing the file.
REFUSAL_S = 3.0


def has_desktop() -> bool:
    """Whether there is a desktop here and a program that opens files on it."""
    return _opener() is not None


def show(path: Path) -> bool:
    """Open a file or folder; whether the desktop took it."""
    opener = _opener()
    if opener is None:
        return False
    process = subprocess.Popen(
        [opener, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C here must not close the player
    )
    try:
        return process.wait(REFUSAL_S) == 0
    except subprocess.TimeoutExpired:
        process.returncode = 0  # it is left alone, so nobody waits for it
        return True


def _opener() -> str | None:
    if sys.platform == "darwin":
        return shutil.which("open")
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return None
    return shutil.which("xdg-open")
