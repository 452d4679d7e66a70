"""File operations below a folder that follow no symbolic links and overwrite no files.

Other users may be able to write to a watched folder, so paths are resolved one name at a time with file descriptors.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

#: Folder for copies that are not complete yet, beside their final names.
COPYING = ".svdq-copying"
#: Size in the signature of anything that is not a regular file.
NOT_REGULAR = -1

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
#: What file systems without hard links answer to `link`.
_NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)


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
        return cls(status.st_size if stat.S_ISREG(status.st_mode) else NOT_REGULAR, status.st_mtime_ns)


def split(path: str) -> tuple[str, str]:
    """Split a path with slashes into its folder and its name."""
    folder, _, name = path.rpartition("/")
    return folder, name


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
            inner = _open(name, _FOLDER, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(name: str, folder: int) -> BufferedReader:
    """Open a regular file in an open folder for reading; never block, as opening a FIFO does.

    Raises:
        OSError: it cannot be opened, or is a symbolic link or another special file.
    """
    descriptor = _open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return os.fdopen(descriptor, "rb")


def signature(root: Path, path: str) -> Signature | None:
    """Return the signature of a file below `root`, or None if it does not exist."""
    folder, name = split(path)
    try:
        with open_folder(root, folder) as here:
            return Signature.of(os.stat(name, dir_fd=here, follow_symlinks=False))
    except OSError:
        return None


def exists(name: str, folder: int) -> bool:
    """Return whether an open folder has anything of this name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def free_names(name: str) -> Iterator[str]:
    """Yield `a.jpg`, `a-2.jpg`, `a-3.jpg` and so on."""
    stem, suffix = os.path.splitext(name)
    yield name
    for number in itertools.count(2):
        yield f"{stem}-{number}{suffix}"


def move(name: str, source: int, target: int, new_name: str) -> str:
    """Move a file from one open folder to another, also across file systems, and return its name there.

    It gets the first free name of `free_names`. If that name has a file with the same bytes, one of the two is kept.

    Raises:
        OSError: it cannot be moved and is still where it was.
    """
    try:
        return _rename(name, source, target, new_name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(COPYING, 0o700, dir_fd=target)
    copying = _open(COPYING, _FOLDER, target)
    try:
        _copy(name, source, copying)
        placed = _rename(name, copying, target, new_name)
    finally:
        os.close(copying)
        with contextlib.suppress(OSError):
            os.rmdir(COPYING, dir_fd=target)
    os.unlink(name, dir_fd=source)
    return placed


def _open(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", name) from error
        raise


def _rename(name: str, source: int, target: int, new_name: str) -> str:
    """Rename within one file system: a hard link, unlike `rename`, never replaces a file."""
    for candidate in free_names(new_name):
        try:
            os.link(name, candidate, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except FileExistsError:
            if not _are_equal(name, source, candidate, target):
                continue
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if exists(candidate, target):
                continue
            os.rename(name, candidate, src_dir_fd=source, dst_dir_fd=target)
            return candidate
        os.unlink(name, dir_fd=source)
        return candidate
    raise AssertionError("names do not end")


def _copy(name: str, source: int, target: int) -> None:
    """Copy a file with its mode and times into a private folder, over what a killed copy left there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open_file(name, source) as file, os.fdopen(os.open(name, flags, 0o600, dir_fd=target), "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            status = os.fstat(file.fileno())
            os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode))
            os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(copy.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=target)
        raise


def _are_equal(name: str, folder: int, other_name: str, other_folder: int) -> bool:
    """Compare the bytes of two regular files."""
    with contextlib.suppress(OSError), open_file(name, folder) as file, open_file(other_name, other_folder) as other:
        if os.fstat(file.fileno()).st_size == os.fstat(other.fileno()).st_size:
            return hashlib.file_digest(file, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()
    return False
