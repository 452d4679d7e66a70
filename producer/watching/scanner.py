"""Finds files of a watched folder that were not processed, and waits until they have stopped growing."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from svdq.producer.job import MAX_FOLDER_LENGTH
from svdq.producer.submitting.sources import is_photo_folder
from svdq.producer.watching.directory import Signature, inside
from svdq.producer.watching.folder_config import WatchOptions
from svdq.producer.watching.state import FileRecord, State


@dataclass(kw_only=True)
class WaitingFile:
    """One version of a file that is not processed yet."""

    path: str
    signature: Signature
    #: When this version was first seen, and when it is to be processed; infinity means in the next run.
    since_s: float
    due_s: float
    is_slow: bool = False  # whether it takes long to decode, and others come first
    is_submitted: bool = False  # whether it was submitted and could not be moved or deleted yet
    #: The versions of its prompt and its last frame by their paths, once these are known.
    beside: dict[str, Signature] = field(default_factory=dict)


@dataclass
class Debounce:
    """Files that wait until they have not changed for a while. Has no clock: times are seconds of any one."""

    stable_for_s: float
    files: dict[str, WaitingFile] = field(default_factory=dict)

    def update(self, path: str, signature: Signature, now_s: float) -> WaitingFile:
        """Record the current version of a file; a new version is due after `stable_for_s`."""
        file = self.files.get(path)
        if file is None or file.signature != signature:
            due_s = now_s + self.stable_for_s
            file = self.files[path] = WaitingFile(path=path, signature=signature, since_s=now_s, due_s=due_s)
        return file

    def due(self, now_s: float) -> list[WaitingFile]:
        """Return the files that are due, the one that waited longest first; they stay until they are removed.

        Of the slow ones it is one, once there are no others.
        """
        due = sorted((file for file in self.files.values() if file.due_s <= now_s), key=lambda file: file.due_s)
        return [file for file in due if not file.is_slow] or due[:1]

    def remove(self, file: WaitingFile) -> None:
        """Stop waiting for a file."""
        self.files.pop(file.path, None)


@dataclass
class Scanner:
    """Lists the files of a watched folder."""

    root: Path
    options: WatchOptions
    excluded: Collection[Path]  # folders that are not entered
    state: State

    def scan(self, waiting: Debounce) -> None:
        """Add the current version of each file that was not processed; raises OSError if the folder cannot be read."""
        for path, signature in self._files():
            if not self._is_processed(path, signature, self.state.get(path)):
                waiting.update(path, signature, time.monotonic())

    def old_files(self) -> Iterator[tuple[str, Signature]]:
        """Yield the files that existed before the folder was first watched, or before they were selected."""
        last = self.state.selection
        for path, signature in self._files():
            record = self.state.get(path)
            is_photo = self.options.selection.matches(path)
            # A file that was ignored may be a photo by the patterns of today.
            is_known = record is not None and not (is_photo and record.outcome == "ignored")
            was_watched = last is not None and (last.matches(path) if is_photo else last.includes(path))
            if not is_known and not was_watched:
                yield path, signature

    def _is_processed(self, path: str, signature: Signature, record: FileRecord | None) -> bool:
        if record is None or record.signature != signature:
            return False
        if record.outcome == "lost":
            return False
        if record.outcome == "skipped":
            return not (self.options.existing or self.options.once)
        if record.outcome == "ignored":
            return not (signature.is_regular and self.options.selection.matches(path))
        return True

    def _files(self) -> Iterator[tuple[str, Signature]]:
        """Yield the files of interest; raises OSError if the watched folder itself cannot be read."""
        excluded = {path.resolve() for path in self.excluded}
        folders = [""]
        while folders:
            folder = folders.pop()
            if folder and self.root / folder in excluded:
                continue
            try:
                files, inner = self._list(folder)
            except OSError:
                if not folder:
                    raise
                continue
            yield from files
            if self.options.selection.recursive:
                folders += reversed(inner)

    def _list(self, folder: str) -> tuple[list[tuple[str, Signature]], list[str]]:
        files, folders = [], []
        with os.scandir(inside(self.root, folder)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if is_photo_folder(entry.name) and len(path) <= MAX_FOLDER_LENGTH:
                        folders.append(path)
                elif self.options.selection.includes(path):
                    with contextlib.suppress(FileNotFoundError):
                        files.append((path, Signature.of(entry.stat(follow_symlinks=False))))
        return files, folders
