"""Chooses the path of the embedded server's unix socket: in its data folder, or a short one if that is too long."""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from svdq.pipeline.errors import UnavailableError

#: Bytes in the path of a unix socket: 107 on Linux, 103 on macOS.
MAX_SOCKET_PATH = 103

SOCKET = "redis.sock"
#: Records where the socket is when it cannot be in the folder itself.
SOCKET_RECORD = "socket-folder"


def socket_path(folder: Path) -> Path:
    """Return the path of a started server's socket: in the folder, or the recorded one."""
    with contextlib.suppress(FileNotFoundError):
        recorded = Path((folder / SOCKET_RECORD).read_text().strip())
        if recorded.name == _short_name(folder):  # otherwise the home is a copy
            return recorded / SOCKET
    return folder / SOCKET


def choose_socket(folder: Path) -> Path:
    """Return a short enough path for the socket, and record it if it is not in the folder."""
    record = folder / SOCKET_RECORD
    if len(os.fsencode(folder / SOCKET)) <= MAX_SOCKET_PATH:
        record.unlink(missing_ok=True)
        return folder / SOCKET
    short = private_folder(Path(tempfile.gettempdir()) / _short_name(folder))
    if len(os.fsencode(short / SOCKET)) > MAX_SOCKET_PATH:
        raise UnavailableError(f"The path {str(short)!r} is too long for a socket; set TMPDIR or SVDQ_HOME shorter.")
    record.write_text(str(short))
    return short / SOCKET


def _short_name(folder: Path) -> str:
    return f"svdq-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"


def private_folder(folder: Path) -> Path:
    """Create a folder that only we can enter; refuse one that another user created in a shared place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UnavailableError(
            f"{str(folder)!r} is not a folder of this user; remove it, or set SVDQ_HOME to another folder."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder
