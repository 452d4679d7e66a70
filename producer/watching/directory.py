"""File operations below a watched folder, to which others may write: follow no symbolic link, overwrite no file."""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from svdq.producer.files import open_regular
from svdq.producer.job import MAX_NAME_BYTES

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


def inside(root: Path, path: str) -> Path:
    """Return the place of a path below `root`; raises OSError if a part of it, not of `root`, is a symbolic link."""
    place = root
    for name in filter(None, path.split("/")):
        place /= name
        if place.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", name)
    return place


def make_folder(root: Path, folder: str) -> Path:
    """Create a folder below `root`; raises OSError as `inside`."""
    inside(root, folder).mkdir(parents=True, exist_ok=True)
    return inside(root, folder)


@contextlib.contextmanager
def open_file(root: Path, path: str) -> Iterator[BufferedReader]:
    """Open a regular file below `root` for reading; raises OSError also if it or a folder is a symbolic link."""
    with open_regular(inside(root, path), os.O_NOFOLLOW) as file:
        if not os.path.samestat(os.fstat(file.fileno()), inside(root, path).lstat()):  # replaced by a link meanwhile
            raise OSError(errno.ELOOP, "it has just been replaced", path)
        yield file


def signature(root: Path, path: str) -> Signature | None:
    """Return the signature of a file below `root`, or None if it does not exist."""
    folder, name = os.path.split(path)
    try:
        return Signature.of((inside(root, folder) / name).lstat())
    except OSError:
        return None


def delete_file(root: Path, path: str, version: Signature) -> None:
    """Delete a file below `root`, unless it was replaced by another version; raises OSError if it cannot."""
    place = inside(root, path)
    if Signature.of(place.lstat()) == version:
        place.unlink()


def move_file(
    root: Path, path: str, version: Signature, target: str, note: str | None = None, name: str | None = None
) -> Path | None:
    """Move a file below `root` to the same path below the folder `target` in it.

    Folders are created, and reached without following links. The file gets `name` or its own, or the first free name
    of `a-2.jpg`, `a-3.jpg` and so on. A `note` is written beside it, to `<name>.txt` if there is no such file. Returns
    the new path, or None if the file was replaced by another version; that stays, as do files when OSError is raised.
    """
    source = inside(root, path)
    folder = make_folder(root, f"{target}/{os.path.dirname(path)}")
    if Signature.of(source.lstat()) != version:
        return None
    stem, suffix = os.path.splitext(name or source.name)
    ends = itertools.chain([suffix], (f"-{number}{suffix}" for number in itertools.count(2)))
    names = (_fitting(stem, end) for end in ends)
    placed = next(place for place in map(folder.joinpath, names) if not os.path.lexists(place))
    source.rename(placed)
    if note is not None:
        with (
            contextlib.suppress(OSError),
            open(f"{placed}.txt", "x", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{note}\n")
    return placed


def _fitting(stem: str, end: str) -> str:
    """Return a name that a file system takes: of one that is too long the stem is cut."""
    while len(os.fsencode(stem + end)) > MAX_NAME_BYTES:
        stem = stem[:-1]
    return stem + end
