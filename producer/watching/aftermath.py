"""What becomes of a file once it was submitted, or was found to be no photo: kept, moved or deleted. Knows no queue.

Whatever has a final name is whole, and no file is ever written over.
"""

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.storage.temporary import sweep, temporary_name

#: Folder in the watched one for files that are no photos.
REJECTED = "rejected"
#: Start of the names of copies on their way to another file system.
COPY_PREFIX = ".svdq-"


@dataclass(frozen=True, kw_only=True)
class Then:
    """What is done with files once they were submitted."""

    #: Whether files stay where they are; then no file is ever touched.
    keeps: bool
    #: Where they are moved to, mirroring the watched folder; None when they are deleted.
    target: Path | None = None

    @classmethod
    def read(cls, text: str, root: Path) -> "Then":
        """Read `keep`, `move:DIR` or `delete`; a relative DIR is in the watched folder.

        Raises:
            InputError: it is none of them, or would move photos to where they are.
        """
        action, _, folder = text.partition(":")
        if action == "move" and folder.strip():
            target = (root / Path(folder).expanduser()).resolve()
            if target == root:
                raise InputError(f"--then {text} is not allowed: the photos are there already; name another folder.")
            return cls(keeps=False, target=target)
        if text not in ("keep", "delete"):
            raise InputError(f"--then {text} is not allowed: it must be keep, move:DIR or delete.")
        return cls(keeps=text == "keep")


def finish(then: Then, root: Path, path: str) -> Path | None:
    """Do with a submitted file what was asked for; return where it was moved to.

    Raises:
        OSError: it cannot be done.
    """
    if then.target is not None:
        return move(root / path, then.target / path)
    if not then.keeps:
        (root / path).unlink(missing_ok=True)
    return None


def set_aside(root: Path, path: str, reason: str) -> Path:
    """Move a file to `rejected/`, the reason beside it in a .txt, and return where it is.

    Raises:
        OSError: it cannot be moved.
    """
    target = _free(root / REJECTED / path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The reason first: a kill between the two leaves the file to be judged again.
    target.with_name(f"{target.name}.txt").write_text(f"{reason}\n", encoding="utf-8", errors="backslashreplace")
    return move(root / path, target)


def move(source: Path, target: Path) -> Path:
    """Move a file, also to another file system, and return where it is: beside a file of that name, not over it.

    Raises:
        OSError: it cannot be moved; it is where it was.
    """
    free = _free(target)
    free.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(free)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if not _is_copy(source, target):  # which a kill just before the end has left
            _copy(source, free)
        source.unlink()
    return free


def sweep_copies(target: Path) -> None:
    """Remove what copies that were killed have left half written."""
    sweep(target.rglob(f"{COPY_PREFIX}*"), COPY_PREFIX)


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(temporary_name(COPY_PREFIX))
    try:
        shutil.copy2(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_copy(source: Path, target: Path) -> bool:
    with contextlib.suppress(OSError):
        one, other = source.stat(), target.stat()
        return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)
    return False


def _free(path: Path) -> Path:
    """Return the path, or the first of `name-2.jpg`, `name-3.jpg`, … that nothing has."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
