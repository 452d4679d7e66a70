"""File operations below a watched folder: they follow no symbolic links, and overwrite no files.

Others may write to the folder, so paths are resolved one name at a time, with file descriptors.
"""

import contextlib
import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

from svdq.producer.files import open_regular

COPYING = ".svdq-copy"  # name of a file until it is copied whole
NOT_REGULAR = -1  # size in the signature of anything that is not a regular file


class Signature(NamedTuple):
    """Identifies a version of a file; without the inode, which memory cards and network shares change at each mount."""

    size: int  # bytes
    mtime_ns: int

    @property
    def is_regular(self) -> bool:
        """Whether it is a regular file, not a link, a FIFO or a device."""
        return self.size != NOT_REGULAR

    @classmethod
    def of(cls, status: os.stat_result) -> "Signature":
        """Make the signature of a result of `lstat` or `fstat`."""
        size = status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR
        return cls(size, min(status.st_mtime_ns, 2**63 - 1))  # the largest integer of SQLite


@contextlib.contextmanager
def open_folder(root: Path, folder: str = "", *, create: bool = False) -> Iterator[int]:
    """Open a folder by its path from `root`, with slashes, and yield its descriptor; `create` makes missing folders.

    Raises OSError also if a part of `folder` is a symbolic link; `root` may be reached through links.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in filter(None, folder.split("/")):
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            _refuse_link(name, descriptor)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_file(root: Path, path: str) -> Iterator[BufferedReader]:
    """Open a regular file below `root` for reading; raises OSError also if it or a folder is a symbolic link."""
    folder, name = os.path.split(path)
    with open_folder(root, folder) as here:
        _refuse_link(name, here)
        with open_regular(name, os.O_NOFOLLOW, folder=here) as file:
            yield file


def _refuse_link(name: str, folder: int) -> None:
    """Say that a name is a link, which the error of opening it with O_NOFOLLOW does not."""
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", name)


def signature(root: Path, path: str) -> Signature | None:
    """Return the signature of a file below `root`, or None if it does not exist."""
    folder, name = os.path.split(path)
    try:
        with open_folder(root, folder) as here:
            return _signature(name, here)
    except OSError:
        return None


def _signature(name: str, folder: int) -> Signature:
    return Signature.of(os.stat(name, dir_fd=folder, follow_symlinks=False))


def delete_file(root: Path, path: str, version: Signature) -> None:
    """Delete a file below `root`, unless it was replaced by another version; raises OSError if it cannot."""
    folder, name = os.path.split(path)
    with open_folder(root, folder) as here:
        if _signature(name, here) == version:
            os.unlink(name, dir_fd=here)


def move_file(
    root: Path,
    path: str,
    version: Signature,
    target: Path,
    subfolder: str,
    note: str | None = None,
    name: str | None = None,
) -> Path | None:
    """Move a file below `root` to the same path below `target/subfolder`, also across file systems.

    `subfolder` is created, and reached without following links. The file gets `name` or its own, or the first free name
    of `a-2.jpg`, `a-3.jpg` and so on. A `note` is written beside it, to `<name>.txt` if there is no such file.

    Returns the new path, or None if the file was replaced by another version, which stays. Raises OSError if it cannot
    be moved; it is still where it was.
    """
    folder, old_name = os.path.split(path)
    with open_folder(root, folder) as here, open_folder(target, f"{subfolder}/{folder}", create=True) as there:
        if _signature(old_name, here) != version:
            return None
        placed = _free_name(name or old_name, there)
        try:
            os.rename(old_name, placed, src_dir_fd=here, dst_dir_fd=there)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with open_regular(old_name, os.O_NOFOLLOW, folder=here) as original:
                _copy(original, there, placed)
            delete_file(root, path, version)
        if note is not None:
            with contextlib.suppress(OSError), _create(f"{placed}.txt", there) as file:
                file.write(f"{note}\n".encode(errors="backslashreplace"))
        return target / subfolder / folder / placed


def _free_name(name: str, folder: int) -> str:
    stem, suffix = os.path.splitext(name)
    names = itertools.chain([name], (f"{stem}-{number}{suffix}" for number in itertools.count(2)))
    return next(name for name in names if not os.access(name, os.F_OK, dir_fd=folder, follow_symlinks=False))


def _create(name: str, folder: int) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb")


def _copy(file: BufferedReader, folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(COPYING, dir_fd=folder)  # of a killed copy
    status = os.fstat(file.fileno())
    with _create(COPYING, folder) as copy:
        os.fchmod(copy.fileno(), status.st_mode & 0o777)  # without setuid: the copy has another owner
        shutil.copyfileobj(file, copy, 1 << 20)
        copy.flush()
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(copy.fileno())
    os.rename(COPYING, name, src_dir_fd=folder, dst_dir_fd=folder)
