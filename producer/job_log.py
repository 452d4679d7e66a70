"""Writes and reads what workers log about a job, which is in Redis beside the job."""

from collections.abc import Sequence
from datetime import UTC, datetime

import redis
from pydantic import ValidationError
from rq.job import Job as RqJob

from svdq.producer import keys, lua
from svdq.producer.records import Record, Time

MAX_TEXT = 4000  # largest number of characters in a log entry; a long traceback loses its middle


class LogEntry(Record):
    """One log entry of a worker about a job."""

    at: Time
    rank: int
    host: str
    level: str  # Python's
    text: str

    @classmethod
    def now(cls, *, rank: int, host: str, level: str, text: str, at: float) -> "LogEntry":
        """Create an entry for a message logged `at` seconds after the epoch."""
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
        return cls(at=datetime.fromtimestamp(at, UTC), rank=rank, host=host, level=level, text=text)


def append_log(pipeline: redis.Redis, job_id: str, entries: Sequence[LogEntry]) -> None:
    """Append entries to the log of a job, of limited size, which expires with the job; one command."""
    lines = "".join(f"{entry.model_dump_json()}\n" for entry in entries)
    lua.run(pipeline, "append_log", [RqJob.key_for(job_id)], keys.LOG_FIELD, lines, keys.LOG_BYTES)


def read_log(connection: redis.Redis, job_id: str) -> list[LogEntry]:
    """Read the log of a job, oldest first; empty if there are no entries or no such job."""
    text = connection.hget(RqJob.key_for(job_id), keys.LOG_FIELD)
    entries = []
    for line in (text or b"").splitlines():
        try:
            entries.append(LogEntry.model_validate_json(line))
        except ValidationError:
            continue  # written by another version
    return entries
