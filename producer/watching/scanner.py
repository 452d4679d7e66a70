"""Finds the files of a watched folder that were not processed, and waits until they have stopped growing."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from svdq.producer.job import MAX_FOLDER_LENGTH
from svdq.producer.watching.directory import Signature, open_folder
from svdq.producer.watching.options import WatchOptions, is_photo_folder
from svdq.producer.watching.post_submit import restore
from svdq.producer.watching.state import Outcome, Record, State


@dataclass(kw_only=True)
class _Pending:
    signature: Signature
    #: When this version was first seen, and when it is to be processed.
    since_s: float
    due_s: float


class Debounce:
    """Files that wait until they have not changed for a while. Has no clock: times are seconds of any one."""

    def __init__(self, stable_for_s: float) -> None:
        """Initialize, empty.

        Args:
            stable_for_s: seconds without a change after which a file is due.
        """
        self._stable_for_s = stable_for_s
        self._files: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._files)

    def update(self, path: str, signature: Signature, now_s: float) -> None:
        """Record the current version of a file; a new version is due after `stable_for_s`."""
        file = self._files.get(path)
        if file is None or file.signature != signature:
            self._files[path] = _Pending(signature=signature, since_s=now_s, due_s=now_s + self._stable_for_s)

    def due(self, now_s: float) -> list[str]:
        """Return the files that are due, the one that waited longest first; they stay until postponed or removed."""
        due = [(file.due_s, path) for path, file in self._files.items() if file.due_s <= now_s]
        return [path for _, path in sorted(due)]

    def postpone(self, path: str, due_s: float) -> None:
        """Change when a file is due, unless it changes before."""
        self._files[path].due_s = due_s

    def remove(self, path: str) -> None:
        """Stop waiting for a file."""
        self._files.pop(path, None)

    def signature(self, path: str) -> Signature:
        """Return the version of a file that is waited for."""
        return self._files[path].signature

    def unchanged_s(self, path: str, now_s: float) -> float:
        """Return for how many seconds a file has not changed."""
        return now_s - self._files[path].since_s


class Scanner:
    """Lists the files of a watched folder. Paths are text, from the watched folder, with slashes."""

    def __init__(self, root: Path, options: WatchOptions, excluded: Sequence[Path], state: State) -> None:
        """Initialize; nothing is opened.

        Args:
            root: the watched folder, resolved.
            options: how it is watched.
            excluded: folders that are not entered, by whatever path they are reached.
            state: what became of files.
        """
        self.root = root
        self._selection = options.selection
        self._existing = options.existing or options.once
        self._excluded = excluded
        self._state = state

    def scan(self, pending: Debounce) -> None:
        """Add the current version of each file that was not processed to `pending`.

        Raises:
            OSError: the folder cannot be read.
            UnavailableError: the state cannot be read.
        """
        for folder, files in self._folders():
            known = self._state.in_folder(folder)
            for name, signature in files.items():
                path = f"{folder}/{name}" if folder else name
                if not self._is_processed(path, signature, known.get(name)):
                    pending.update(path, signature, time.monotonic())

    def old_files(self) -> Iterator[tuple[str, Signature]]:
        """Yield the files that existed before the folder was first watched, or before they were selected.

        Raises:
            OSError: the folder cannot be read.
        """
        last = self._state.selection
        for folder, files in self._folders():
            known = self._state.in_folder(folder)
            for name, signature in files.items():
                path = f"{folder}/{name}" if folder else name
                is_photo = self._selection.matches(path)
                # A file that was ignored may be a photo by the patterns of today.
                is_known = name in known and not (is_photo and known[name].outcome is Outcome.IGNORED)
                was_watched = last is not None and (last.matches(path) if is_photo else last.includes(path))
                if not is_known and not was_watched:
                    yield path, signature

    def _is_processed(self, path: str, signature: Signature, record: Record | None) -> bool:
        if record is None or record.signature != signature:
            return False
        if record.outcome is Outcome.SKIPPED:
            return not self._existing
        if record.outcome is Outcome.IGNORED:
            return not (signature.is_regular and self._selection.matches(path))
        return True

    def _folders(self) -> Iterator[tuple[str, dict[str, Signature]]]:
        """Yield each folder with the files in it that are of interest; skip folders that cannot be read.

        Raises:
            OSError: the watched folder itself cannot be read.
        """
        excluded = {identity for path in self._excluded if (identity := _identity(path))}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                files, folders = self._list(folder, excluded)
            except OSError:
                if not folder:
                    raise
                continue
            yield folder, files
            if self._selection.recursive:
                waiting.extend(sorted(folders, reverse=True))

    def _list(self, folder: str, excluded: set[tuple[int, int]]) -> tuple[dict[str, Signature], list[str]]:
        files: dict[str, Signature] = {}
        folders = []
        with open_folder(self.root, folder) as descriptor:
            # The identity of a folder, unlike its path, is the same through links and bind mounts.
            if folder and _identity(descriptor) in excluded:
                return {}, []
            restore(descriptor)
            with os.scandir(descriptor) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if is_photo_folder(entry.name) and len(path) <= MAX_FOLDER_LENGTH:
                            folders.append(path)
                    elif self._selection.includes(path):
                        try:
                            files[entry.name] = Signature.of(entry.stat(follow_symlinks=False))
                        except FileNotFoundError:
                            continue
        return files, folders


def _identity(folder: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino
