"""Makes private folders, and chooses the path of the embedded server's unix socket: in its folder, or a short one."""

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from svdq.pipeline.errors import UnavailableError

#: Bytes in the path of a unix socket: 107 on Linux, 103 on macOS.
MAX_SOCKET_PATH = 103

SOCKET = "redis.sock"
#: Where the socket is if the path of its folder is too long. Not TMPDIR, which may differ between processes.
_SHORT_FOLDER = Path("/tmp")  # noqa: S108 - the folder in it is private


def socket_path(folder: Path) -> Path:
    """Return a path for the socket of the server with a data folder: in that folder, or a short one."""
    if len(os.fsencode(folder / SOCKET)) <= MAX_SOCKET_PATH:
        return folder / SOCKET
    name = f"svdq-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    return _SHORT_FOLDER / name / SOCKET


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


def make_home(home: Path) -> None:
    """Create SVDQ_HOME unless it exists, closed to other users whatever the umask is.

    Raises:
        OSError: it cannot be created.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_home(home)


def close_home(home: Path) -> None:
    """Close an existing SVDQ_HOME to other users if it is ours.

    Raises:
        OSError: it does not exist, or its mode cannot be changed.
    """
    status = home.stat()
    if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
        home.chmod(0o700)
