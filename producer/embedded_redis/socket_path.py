"""Where the embedded server's unix socket lies: in the folder of its data, or in a short one when that is too long.

Knows nothing of servers.
"""

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
    """Where the socket of a started server is: in the folder, or where the record says."""
    with contextlib.suppress(FileNotFoundError):
        recorded = Path((folder / SOCKET_RECORD).read_text().strip())
        if recorded.name == _short_name(folder):  # else the home was copied from elsewhere
            return recorded / SOCKET
    return folder / SOCKET


def choose_socket(folder: Path) -> Path:
    """Return a path for the socket that is short enough, and record it when it is not in the folder."""
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
    """Make a folder that only we can enter; one in a shared place could have been put there by someone else."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UnavailableError(f"{str(folder)!r} is not a folder of our own; remove it or set SVDQ_HOME anew.")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder
