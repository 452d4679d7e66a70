"""The watched folder on disk: which files lie in it, and how they are now. Knows no ledger and no queue."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from svdq.producer.watching.selection import Selection, is_plain_folder, is_temporary
from svdq.producer.watching.settling import Signature

#: The files of one folder that are taken or told of: their names, and how they are.
Files = dict[str, Signature]


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

    def scan(self, folder: str = "") -> Iterator[tuple[str, Files]]:
        """Yield each folder from `folder` on, with the files in it. What vanishes or may not be read is passed over.

        Raises:
            OSError: `folder` itself cannot be read.
        """
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            try:
                files, folders = self._list(here)
            except OSError:
                if here == folder:
                    raise
                continue
            yield here, files
            if self._selection.recursive:
                waiting.extend(reversed(folders))

    def look(self, path: str) -> Signature | None:
        """Return how a file is now, or None when there is none that is taken or told of."""
        if not self._selection.sees(path) or not self._is_open(path.rpartition("/")[0]):
            return None
        return _signature(self.root / path)

    def takes(self, path: str) -> bool:
        """Whether a file is a photo by its name; others that are seen are only told of."""
        return self._selection.takes(path)

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

    def _list(self, here: str) -> tuple[Files, list[str]]:
        prefix = f"{here}/" if here else ""
        files: Files = {}
        folders = []
        with os.scandir(self.root / here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if is_plain_folder(entry.name) and self._is_open(path):
                        folders.append(path)
                elif self._selection.sees(path) and (signature := _signature(entry)):
                    files[entry.name] = signature
        return files, folders

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
