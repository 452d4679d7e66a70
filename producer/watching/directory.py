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

from svdq.producer.regular_file import open_regular

#: Private folder beside a file that is being moved or deleted, and beside the final name of one that is being copied.
MOVING, COPYING = ".svdq-moving", ".svdq-copying"
#: Size in the signature of anything that is not a regular file.
NOT_REGULAR = -1
#: Latest time in a signature, in the year 2262: SQLite has no larger integers.
MAX_MTIME_NS = 2**63 - 1

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
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
            return Signature.of(os.stat(name, dir_fd=here, follow_symlinks=False))
    except OSError:
        return None


def delete_file(root: Path, path: str, version: Signature) -> None:
    """Delete a file below `root`, unless it was replaced by another version.

    Raises:
        OSError: it cannot be deleted.
    """
    with _claimed(root, path, version) as source:
        if source is not None:
            os.unlink(os.path.basename(path), dir_fd=source)


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

    It gets the first free name of `a.jpg`, `a-2.jpg`, `a-3.jpg` and so on. If a name has a file with the same bytes,
    one of the two is kept.

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
    name = name or old_name
    with (
        _claimed(root, path, version) as source,
        open_folder(target, f"{subfolder}/{folder}", create=True) as there,
    ):
        if source is None:
            return None
        placed = _move(old_name, source, there, name)
        if note is not None:
            with contextlib.suppress(OSError):  # a file of that name is there, or the disk is full
                descriptor = os.open(f"{placed}.txt", _NEW_FILE, 0o666, dir_fd=there)
                with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{note}\n")
        return target / subfolder / folder / placed


def restore(folder: int) -> None:
    """Move the files that a killed watcher had claimed in an open folder back to their names."""
    if _exists(MOVING, folder):
        with contextlib.suppress(OSError), _private_folder(MOVING, folder) as private:
            _move_all(private, folder)


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


@contextlib.contextmanager
def _private_folder(name: str, parent: int) -> Iterator[int]:
    """Create and open a folder that only this user can enter, and remove it at the end if it is empty."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    with _links_named(name, parent):
        descriptor = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _move_all(source: int, target: int) -> None:
    for name in os.listdir(source):
        _move(name, source, target, name)


@contextlib.contextmanager
def _claimed(root: Path, path: str, version: Signature) -> Iterator[int | None]:
    """Rename a file into a private folder and yield that folder, or None if the file is another version.

    A newer version that takes the name meanwhile is neither moved nor deleted. A file that is still in the private
    folder at the end gets its name back.
    """
    folder, name = os.path.split(path)
    with open_folder(root, folder) as here, _private_folder(MOVING, here) as private:
        _move_all(private, here)  # what a killed watcher left
        os.rename(name, name, src_dir_fd=here, dst_dir_fd=private)
        try:
            found = Signature.of(os.stat(name, dir_fd=private, follow_symlinks=False))
            yield private if found == version else None
        finally:
            _move_all(private, here)


def _move(name: str, source: int, target: int, new_name: str) -> str:
    """Move a file from one open folder to another and return its name there; see `move_file`."""
    try:
        return _rename(name, source, target, new_name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    with _private_folder(COPYING, target) as copying, contextlib.ExitStack() as stack:
        stack.callback(_unlink, name, copying)
        _unlink(name, copying)  # what a killed copy left, which may be linked to a complete file
        _copy(name, source, copying)
        placed = _rename(name, copying, target, new_name)
    os.unlink(name, dir_fd=source)
    return placed


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _free_names(name: str) -> Iterator[str]:
    stem, suffix = os.path.splitext(name)
    yield name
    for number in itertools.count(2):
        yield f"{stem}-{number}{suffix}"


def _rename(name: str, source: int, target: int, new_name: str) -> str:
    """Rename within one file system: a hard link, unlike `rename`, never replaces a file."""
    for candidate in _free_names(new_name):
        try:
            os.link(name, candidate, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except FileExistsError:
            if not _are_equal(name, source, candidate, target):
                continue
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if _exists(candidate, target):
                continue
            os.rename(name, candidate, src_dir_fd=source, dst_dir_fd=target)
            return candidate
        os.unlink(name, dir_fd=source)
        return candidate
    raise AssertionError("names do not end")


def _copy(name: str, source: int, target: int) -> None:
    """Copy a file with its mode and times into a private folder."""
    with _open_in(name, source) as file, os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=target), "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)
        copy.flush()
        status = os.fstat(file.fileno())
        os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode))
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(copy.fileno())


def _are_equal(name: str, folder: int, other_name: str, other_folder: int) -> bool:
    """Compare the bytes of two regular files."""
    with contextlib.suppress(OSError), _open_in(name, folder) as file, _open_in(other_name, other_folder) as other:
        if os.fstat(file.fileno()).st_size == os.fstat(other.fileno()).st_size:
            return hashlib.file_digest(file, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()
    return False
