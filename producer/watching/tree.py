"""The watched folder on disk: which photos lie in it, and how they are now. Knows no ledger and no queue."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from svdq.producer.watching.selection import Selection, is_plain_folder, is_temporary
from svdq.producer.watching.settling import Signature

#: The photos of one folder: their names, and how they are.
Photos = dict[str, Signature]


class Tree:
    """One watched folder. Paths are text, from the watched folder on, with slashes."""

    def __init__(self, root: Path, selection: Selection, excluded: Sequence[Path]) -> None:
        """Make it; nothing is opened.

        Args:
            root: the watched folder, resolved.
            selection: which files are wanted.
            excluded: absolute folders in which nothing is, such as where photos are moved to.
        """
        self.root = root
        self._selection = selection
        self._excluded = frozenset(map(str, excluded))

    def scan(self, folder: str = "") -> Iterator[tuple[str, Photos]]:
        """Yield each folder from `folder` on, with the photos in it. What vanishes or may not be read is passed over.

        Raises:
            OSError: `folder` itself cannot be read.
        """
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            try:
                photos, folders = self._list(here)
            except OSError:
                if here == folder:
                    raise
                continue
            yield here, photos
            if self._selection.recursive:
                waiting.extend(reversed(folders))

    def look(self, path: str) -> Signature | None:
        """Return how a photo is now, or None when there is none that is wanted."""
        if not self._selection.takes(path) or not self._is_open(path.rpartition("/")[0]):
            return None
        return _signature(self.root / path)

    def is_folder(self, path: str) -> bool:
        """Whether photos in this folder are wanted, and it is there."""
        is_wanted = self._selection.recursive and all(map(is_plain_folder, path.split("/")))
        return is_wanted and self._is_open(path) and (self.root / path).is_dir()

    def has_partial(self, path: str) -> bool:
        """Whether a download under way lies beside a file: some browsers put an empty file in its final place."""
        folder, _, name = path.rpartition("/")
        stem = PurePosixPath(name).stem
        with contextlib.suppress(OSError):
            return any(is_temporary(other) and other.startswith(stem) for other in os.listdir(self.root / folder))
        return False

    def _list(self, here: str) -> tuple[Photos, list[str]]:
        prefix = f"{here}/" if here else ""
        photos: Photos = {}
        folders = []
        with os.scandir(self.root / here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if is_plain_folder(entry.name) and self._is_open(path):
                        folders.append(path)
                elif self._selection.takes(path) and (signature := _signature(entry)):
                    photos[entry.name] = signature
        return photos, folders

    def _is_open(self, folder: str) -> bool:
        """Whether a folder is reached without links, which may lead in circles, and lies in none that is excluded."""
        path = self.root / folder
        return path.resolve() == path and not any(str(one) in self._excluded for one in (path, *path.parents))


def _signature(file: Path | os.DirEntry[str]) -> Signature | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return Signature(status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
