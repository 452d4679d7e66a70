"""The outcome of each file of a watched folder, in SQLite under SVDQ_HOME: the folder may be read-only."""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.files import make_home
from svdq.producer.watching.directory import Signature
from svdq.producer.watching.folder_config import FileFilter

#: The exclusive lock lasts until the process ends, without shared memory, which network file systems lack. A power cut
#: may undo the last changes: the files are then submitted again, which finds their jobs.
_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS seen (
  folder BLOB NOT NULL, name BLOB NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
  outcome TEXT NOT NULL, job_id TEXT NOT NULL, PRIMARY KEY (folder, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""

#: A `known` photo has a job already; a `rejected` file is no photo; an `ignored` one is a link, or its name does not
#: end like a photo's; a `problem` may be `resolved` and is reported once.
Kind = Literal["watching", "submitted", "known", "rejected", "ignored", "problem", "resolved", "stopped"]

#: Outcomes that are remembered, of files that are still in the folder. `skipped`: it existed before the first watch,
#: and `--existing` was not given. `last`: it is the last frame of another photo. `lost`: it was submitted to a Redis
#: that has its job no more.
Outcome = Literal["skipped", "submitted", "rejected", "ignored", "last", "lost"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event, with a sentence or the line of a job as its text."""

    kind: Kind
    text: str
    path: str | None = None  # from the watched folder
    job_id: str | None = None
    moved_to: str | None = None  # where the file is now, if it was rejected and moved

    def as_json(self) -> dict[str, Any]:
        """Return one flat JSON object with the time; fields that do not apply are left out."""
        values = {"path": self.path, "id": self.job_id, "moved_to": self.moved_to, "text": self.text}
        given = {name: value for name, value in values.items() if value}
        return {"event": self.kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds")} | given


OnEvent = Callable[[Event], None]


class FileRecord(NamedTuple):
    """The record of one file, with the id of its job if it was submitted."""

    signature: Signature
    outcome: Outcome
    job_id: str = ""


class State:
    """The memory of `root`, a resolved folder; methods raise UnavailableError, and this InputError if it is in use."""

    def __init__(self, home: Path, root: Path) -> None:
        stem = hashlib.sha256(os.fsencode(root)).hexdigest()[:20]
        self._path = home / "watch" / f"{stem}.sqlite"
        with self._plain_errors():
            make_home(home)
            self._path.parent.mkdir(exist_ok=True)
            self._database = sqlite3.connect(self._path, isolation_level=None, timeout=0)
            try:
                self._database.executescript(_SCHEMA)
            except sqlite3.Error as error:
                self._database.close()
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    taken = f"The folder {str(root)!r} is already watched by another process"
                    raise InputError(f"{taken}; a folder can have only one watcher.") from error
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    @property
    def selection(self) -> FileFilter | None:
        """The files that were watched in the last run, or None before the first."""
        values = self._meta("selection")
        return values and FileFilter(recursive=values["recursive"], globs=tuple(values["globs"]))

    @property
    def targets(self) -> frozenset[str]:
        """The folders that photos were moved to in any run, by their paths from the watched folder."""
        return frozenset(self._meta("targets") or ())

    def begin(
        self,
        selection: FileFilter,
        skipped: Iterable[tuple[str, Signature]],
        targets: frozenset[str] = frozenset(),
        database: str = "",
    ) -> None:
        """Record in one transaction which files are watched from now on, the skipped ones, and the `targets`.

        The jobs of files that were submitted to another `database` of Redis, or to this one before it was emptied, are
        lost; "" if it is not known.
        """
        with self._plain_errors(), self._database:  # which commits or rolls back
            self._execute("BEGIN")
            if database:
                if self._meta("database") not in (None, database):
                    self._execute("UPDATE seen SET outcome = 'lost' WHERE outcome = 'submitted'")
                self._execute("REPLACE INTO meta VALUES (?, ?)", "database", json.dumps(database))
            for path, signature in skipped:
                self.put(path, FileRecord(signature, "skipped"))
            for key, value in (("selection", asdict(selection)), ("targets", sorted(targets))):
                self._execute("REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def get(self, path: str) -> FileRecord | None:
        """Return the record of a file, by its path from the watched folder."""
        query = "SELECT size, mtime_ns, outcome, job_id FROM seen WHERE folder = ? AND name = ?"
        row = self._execute(query, *_key(path)).fetchone()
        return FileRecord(Signature(*row[:2]), *row[2:]) if row else None

    def put(self, path: str, record: FileRecord) -> None:
        """Remember a file, in place of its earlier record."""
        values = (*_key(path), *record.signature, record.outcome, record.job_id)
        self._execute("REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)", *values)

    def remove(self, path: str) -> None:
        """Forget a file."""
        self._execute("DELETE FROM seen WHERE folder = ? AND name = ?", *_key(path))

    def _meta(self, key: str) -> Any:
        row = self._execute("SELECT value FROM meta WHERE key = ?", key).fetchone()
        return json.loads(row[0]) if row else None

    def _execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        with self._plain_errors():
            return self._database.execute(sql, values)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UnavailableError(
                f"The watcher's state in {str(self._path)!r} cannot be read or written ({reason}); check its disk and "
                "its permissions, or remove it: photos that are in the folder then count as old."
            ) from error


def _key(path: str) -> tuple[bytes, ...]:
    return tuple(map(os.fsencode, os.path.split(path)))
