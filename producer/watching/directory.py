"""File operations below a folder that follow no symbolic links and overwrite no files.

Other users may be able to write to a watched folder, so paths are resolved one name at a time with file descriptors. A
file that is replaced in the very moment of its move is moved in place of the one before.
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
from typing import NamedTuple

from svdq.producer.files import open_regular

#: Name of a file until it is copied whole.
COPYING = ".svdq-copy"
#: Size in the signature of anything that is not a regular file.
NOT_REGULAR = -1
#: Latest time in a signature, in the year 2262: SQLite has no larger integers.
MAX_MTIME_NS = 2**63 - 1

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Signature(NamedTuple):
    """What identifies a version of a file.

    The inode is not part of it: memory cards and some network shares number their files anew at each mount.
    """

    #: Bytes.
    size: int
    #: Time of the last write, in nanoseconds.
    mtime_ns: int

    @property
    def is_regular(self) -> bool:
        """Whether it is a regular file, not a link, a FIFO or a device."""
        return self.size != NOT_REGULAR

    @classmethod
    def of(cls, status: os.stat_result) -> "Signature":
        """Make the signature of what `lstat` or `fstat` returned."""
        size = status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR
        return cls(size, min(status.st_mtime_ns, MAX_MTIME_NS))


@contextlib.contextmanager
def open_folder(root: Path, folder: str = "", *, create: bool = False) -> Iterator[int]:
    """Open a folder below `root` and yield its descriptor.

    Args:
        root: trusted, may be reached through links.
        folder: path from `root`, with slashes.
        create: make the folders that do not exist.

    Raises:
        OSError: it cannot be opened, or a part of `folder` is a symbolic link.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in filter(None, folder.split("/")):
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            with _links_named(name, descriptor):
                inner = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_file(root: Path, path: str) -> Iterator[BufferedReader]:
    """Open a regular file below `root` for reading.

    Raises:
        OSError: it cannot be opened, or it or a folder is a symbolic link or another special file.
    """
    folder, name = os.path.split(path)
    with open_folder(root, folder) as here, _open_in(name, here) as file:
        yield file


def _open_in(name: str, folder: int) -> BufferedReader:
    with _links_named(name, folder):
        return open_regular(name, os.O_NOFOLLOW, folder=folder)


def signature(root: Path, path: str) -> Signature | None:
    """Return the signature of a file below `root`, or None if it does not exist."""
    folder, name = os.path.split(path)
    try:
        with open_folder(root, folder) as here:
            return _signature(name, here)
    except OSError:
        return None


def delete_file(root: Path, path: str, version: Signature) -> None:
    """Delete a file below `root`, unless it was replaced by another version.

    Raises:
        OSError: it cannot be deleted.
    """
    folder, name = os.path.split(path)
    with open_folder(root, folder) as here:
        _unlink(name, here, version)


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

    It gets the first free name of `a.jpg`, `a-2.jpg`, `a-3.jpg` and so on.

    Args:
        root: trusted, may be reached through links.
        path: from `root`, with slashes.
        version: the version to move.
        target: trusted, may be reached through links.
        subfolder: reached without following links; created.
        note: written beside the file, to `<name>.txt` if there is no such file.
        name: its new name, if it is to have another.

    Returns:
        the new path, or None if the file was replaced by another version, which stays.

    Raises:
        OSError: it cannot be moved and is still where it was.
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
            _copy(old_name, here, there, placed)
            _unlink(old_name, here, version)
        if note is not None:
            with contextlib.suppress(OSError):  # a file of that name is there, or the disk is full
                descriptor = os.open(f"{placed}.txt", _NEW_FILE, 0o666, dir_fd=there)
                with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{note}\n")
        return target / subfolder / folder / placed


@contextlib.contextmanager
def _links_named(name: str, folder: int) -> Iterator[None]:
    """Say that a name is a symbolic link where the error of opening it does not."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", name) from error
        raise


def _signature(name: str, folder: int) -> Signature:
    return Signature.of(os.stat(name, dir_fd=folder, follow_symlinks=False))


def _unlink(name: str, folder: int, version: Signature) -> None:
    """Delete a file if it has this version."""
    if _signature(name, folder) == version:
        os.unlink(name, dir_fd=folder)


def _free_name(name: str, folder: int) -> str:
    stem, suffix = os.path.splitext(name)
    for number in itertools.count(1):
        candidate = name if number == 1 else f"{stem}-{number}{suffix}"
        try:
            os.stat(candidate, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return candidate
    raise AssertionError("names do not end")


def _copy(name: str, source: int, target: int, new_name: str) -> None:
    """Copy a file whole, with its rights and times, to another file system."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(COPYING, dir_fd=target)  # what a killed copy left
    with _open_in(name, source) as file, os.fdopen(os.open(COPYING, _NEW_FILE, 0o600, dir_fd=target), "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)
        copy.flush()
        status = os.fstat(file.fileno())
        os.fchmod(copy.fileno(), status.st_mode & 0o777)  # without setuid: the copy has another owner
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(copy.fileno())
    os.rename(COPYING, new_name, src_dir_fd=target, dst_dir_fd=target)
