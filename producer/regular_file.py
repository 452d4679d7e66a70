"""Opens regular files only: a FIFO would block, and a device may never end."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path | str, flags: int = 0, *, folder: int | None = None) -> BufferedReader:
    """Open a regular file for reading; never blocks.

    `flags` are more of `os.open`. A relative path is in the open `folder`, if there is one.

    Raises:
        OSError: it cannot be opened; IsADirectoryError: it is a folder; EINVAL: it is another special file.
        ValueError: the path has a null byte.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
