"""What a watcher remembers of a folder's files, in one SQLite file a folder under SVDQ_HOME.

It is not in the watched folder, where `rsync --delete` or a read-only card would get in the way.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import IO, NamedTuple, Self

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.watching.directory import Signature, split
from svdq.producer.watching.options import Selection

_SCHEMA = """
CREATE TABLE IF NOT EXISTS seen (
  folder BLOB NOT NULL, name BLOB NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
  outcome TEXT NOT NULL, job_id TEXT NOT NULL, PRIMARY KEY (folder, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class Outcome(StrEnum):
    """What became of a file."""

    #: It existed before the folder was first watched, and `--existing` was not given.
    SKIPPED = "skipped"
    #: It was submitted and stays where it is.
    SUBMITTED = "submitted"
    #: It is no photo; this was reported.
    REJECTED = "rejected"
    #: Its name is not that of a photo, or it is a link; this was reported.
    IGNORED = "ignored"


class Record(NamedTuple):
    """What is remembered of one file."""

    signature: Signature
    outcome: Outcome
    #: Id of its job, if it was submitted.
    job_id: str = ""


class State:
    """The memory of one watched folder. Only one process can have it open.

    Raises:
        InputError: another watcher has it open.
        UnavailableError: from every method, when it cannot be read or written.
    """

    def __init__(self, home: Path, root: Path) -> None:
        """Open or create it.

        Args:
            home: SVDQ_HOME.
            root: the watched folder, resolved.
        """
        stem = hashlib.sha256(os.fsencode(root)).hexdigest()[:20]
        self._path = home / "watch" / f"{stem}.sqlite"
        with self._plain_errors(), contextlib.ExitStack() as stack:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(self._path.with_suffix(".lock"), root))
            self._database = sqlite3.connect(self._path, isolation_level=None)
            stack.callback(self._database.close)
            # The lock excludes other processes; this avoids shared memory, which network file systems lack.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            # A power cut may undo the last changes. The files are then submitted again, which finds their jobs.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it and release the lock."""
        self._open.close()

    @property
    def selection(self) -> Selection | None:
        """The files that were watched in the last run, or None before the first."""
        with self._plain_errors():
            row = self._database.execute("SELECT value FROM meta WHERE key = 'selection'").fetchone()
            if row is None:
                return None
            values = json.loads(row[0])
            return Selection(recursive=values["recursive"], globs=tuple(values["globs"]))

    def begin(self, selection: Selection, skipped: Iterable[tuple[str, Signature]]) -> None:
        """Record in one transaction which files are watched from now on and which ones are skipped."""
        with self._plain_errors(), self._database:  # which commits or rolls back
            self._database.execute("BEGIN")
            for path, signature in skipped:
                self.put(path, Record(signature, Outcome.SKIPPED))
            self._database.execute("REPLACE INTO meta VALUES ('selection', ?)", (json.dumps(asdict(selection)),))

    def get(self, path: str) -> Record | None:
        """Return the record of a file, by its path from the watched folder."""
        folder, name = split(path)
        return self.in_folder(folder, name).get(name)

    def in_folder(self, folder: str, name: str | None = None) -> dict[str, Record]:
        """Return the records of the files in one folder by name, or only that of `name`."""
        query = "SELECT name, size, mtime_ns, outcome, job_id FROM seen WHERE folder = ?"
        key = [os.fsencode(folder)]
        if name is not None:
            query += " AND name = ?"
            key.append(os.fsencode(name))
        with self._plain_errors():
            rows = self._database.execute(query, key)
            return {
                os.fsdecode(found): Record(Signature(size, mtime_ns), Outcome(outcome), job_id)
                for found, size, mtime_ns, outcome, job_id in rows
            }

    def put(self, path: str, record: Record) -> None:
        """Remember a file, in place of its earlier record."""
        values = (*map(os.fsencode, split(path)), *record.signature, record.outcome, record.job_id)
        with self._plain_errors():
            self._database.execute("REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)", values)

    def remove(self, path: str) -> None:
        """Forget a file."""
        key = tuple(map(os.fsencode, split(path)))
        with self._plain_errors():
            self._database.execute("DELETE FROM seen WHERE folder = ? AND name = ?", key)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, KeyError) as error:
            raise UnavailableError(
                f"The watcher's state in {str(self._path)!r} cannot be read or written ({error}); check its disk and "
                "its permissions, or remove it: photos that are in the folder then count as old."
            ) from error


def _lock(path: Path, root: Path) -> IO[str]:
    """Take a lock that the kernel releases however the process ends; the file names its process."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        process = file.read().strip() or "?"
        file.close()
        raise InputError(
            f"The folder {str(root)!r} is already watched by process {process}; a folder can have only one watcher."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
