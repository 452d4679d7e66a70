"""What a watcher remembers of a folder: which files it has dealt with. One SQLite file a folder, under the home.

It is not kept in the watched folder, where `rsync --delete` or a read-only card would undo it. Every change is one
transaction, written out before the next step is taken, so that after kill -9 it is known how far each file had come.
Knows no Redis and opens no photo.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Self

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.watching.selection import Selection
from svdq.producer.watching.settling import Signature

#: Seconds after which a file that is no longer there is forgotten. Not at once: the share may just not be mounted.
FORGET_S = 30 * 24 * 60 * 60

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  folder BLOB NOT NULL, name BLOB NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
  state TEXT NOT NULL, job_id TEXT NOT NULL, job TEXT NOT NULL, priority TEXT NOT NULL, gone_at REAL,
  PRIMARY KEY (folder, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class State(StrEnum):
    """How far a file has come."""

    #: It lay there before the folder was first watched, and was not wanted.
    LEFT = "left"
    #: It is being submitted; whether Redis has the job is not known.
    SUBMITTING = "submitting"
    #: Redis has the job; what is to be done with the file then is not done.
    SUBMITTED = "submitted"
    #: There is nothing more to do.
    DONE = "done"
    #: It is no photo; that was said.
    BAD = "bad"
    #: By its name it is no photo, so nobody has opened it; that was said.
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is remembered of one file."""

    signature: Signature
    state: State
    #: Id of its job, from when it is being submitted.
    job_id: str = ""
    #: JSON of its job and the queue it goes to, while it is being submitted.
    job: str = ""
    priority: str = ""


class Ledger:
    """The memory of one watched folder, and the right to watch it: nobody else has it open.

    Raises:
        InputError: another watcher has it open.
        UnavailableError: from every method, when it cannot be read or written.
    """

    def __init__(self, home: Path, root: Path) -> None:
        """Open it, or begin it.

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
            # Nobody else opens it, which also spares the shared memory that network file systems have not.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            # A power cut may undo the last changes: then a file is submitted again, which finds its job in Redis.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
            self._set("root", str(root))
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        """Nothing more to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it and let others watch the folder."""
        self._open.close()

    @property
    def scope(self) -> Selection | None:
        """What was watched the last time, or None when this is the first."""
        with self._plain_errors():
            row = self._database.execute("SELECT value FROM meta WHERE key = 'scope'").fetchone()
            if row is None:
                return None
            values = json.loads(row[0])
            return Selection(recursive=values["recursive"], globs=tuple(values["globs"]))

    def begin(self, scope: Selection, left: Iterable[tuple[str, Signature]]) -> None:
        """Take note, in one step, of what is watched from now on and of the files that are not wanted."""
        with self._plain_errors(), self._transaction():
            for path, signature in left:
                self.put(path, Record(signature=signature, state=State.LEFT))
            self._set("scope", json.dumps(asdict(scope)))

    def get(self, path: str) -> Record | None:
        """Return what is known of a file, by its path from the watched folder."""
        folder, name = _key(path)
        with self._plain_errors():
            row = self._database.execute(
                "SELECT size, mtime_ns, state, job_id, job, priority FROM files WHERE folder = ? AND name = ?",
                (folder, name),
            ).fetchone()
            return _record(*row) if row else None

    def in_folder(self, folder: str) -> dict[str, Record]:
        """Return what is known of the files in one folder, by their names."""
        with self._plain_errors():
            rows = self._database.execute(
                "SELECT name, size, mtime_ns, state, job_id, job, priority FROM files WHERE folder = ?",
                (os.fsencode(folder),),
            )
            return {os.fsdecode(name): _record(*values) for name, *values in rows}

    def put(self, path: str, record: Record) -> None:
        """Remember a file, in place of what was known of it."""
        values = (*_key(path), *record.signature, record.state, record.job_id, record.job, record.priority)
        with self._plain_errors():
            self._database.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", values)

    def remove(self, path: str) -> None:
        """Forget a file."""
        with self._plain_errors():
            self._database.execute("DELETE FROM files WHERE folder = ? AND name = ?", _key(path))

    def forget_gone(self, root: Path, *, forget_s: float = FORGET_S) -> None:
        """Forget files that have not been there for long; one that comes back is as it was."""
        now_s = time.time()
        with self._plain_errors(), self._transaction():
            for (folder,) in self._database.execute("SELECT DISTINCT folder FROM files").fetchall():
                rows = self._database.execute("SELECT name, gone_at FROM files WHERE folder = ?", (folder,)).fetchall()
                for name, gone_at in rows:
                    is_gone = not os.path.lexists(os.path.join(os.fsencode(root), folder, name))
                    if is_gone == (gone_at is None):
                        self._database.execute(
                            "UPDATE files SET gone_at = ? WHERE folder = ? AND name = ?",
                            (now_s if is_gone else None, folder, name),
                        )
            self._database.execute("DELETE FROM files WHERE gone_at < ?", (now_s - forget_s,))

    def _set(self, key: str, value: str) -> None:
        self._database.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, KeyError) as error:
            raise UnavailableError(
                f"What is known of the watched folder cannot be read or written in {str(self._path)!r} ({error}); "
                "check that there is room and that it may be written, or remove it: then photos that are there are old."
            ) from error


def _lock(path: Path, root: Path) -> IO[str]:
    """Take the lock that the kernel frees however the process ends; the file says who has it."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        process = file.read().strip() or "?"
        file.close()
        raise InputError(
            f"The folder {str(root)!r} is watched already, by process {process}; one watcher is enough for a folder."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _key(path: str) -> tuple[bytes, bytes]:
    """Split a path; as bytes, for names need not be UTF-8."""
    folder, _, name = path.rpartition("/")
    return os.fsencode(folder), os.fsencode(name)


def _record(size: int, mtime_ns: int, state: str, job_id: str, job: str, priority: str) -> Record:
    return Record(signature=Signature(size, mtime_ns), state=State(state), job_id=job_id, job=job, priority=priority)
