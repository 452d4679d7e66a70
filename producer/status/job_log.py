"""The log entries of workers about a job, stored with the job so that they expire with it.

The size is limited: the newest lines are kept.
"""

from datetime import UTC, datetime

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from rq.job import Job as RqJob

from svdq.producer import keys

#: Largest number of characters in an entry; a long traceback loses its middle.
MAX_TEXT = 4000

#: Appends lines, and removes the oldest lines above the size limit; does not recreate a removed job.
#: KEYS: the job. ARGV: field, lines, bytes.
_APPEND = """
if redis.call('exists', KEYS[1]) == 0 then
  return
end
local log = (redis.call('hget', KEYS[1], ARGV[1]) or '') .. ARGV[2]
local limit = tonumber(ARGV[3])
if #log > limit then
  local cut = string.find(log, '\\n', #log - limit, true)
  log = string.sub(log, (cut or 0) + 1)
end
redis.call('hset', KEYS[1], ARGV[1], log)
"""


class LogEntry(BaseModel):
    """One log entry of a worker."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: When.
    at: datetime
    #: The rank, and its host.
    rank: int
    host: str
    #: Python's level: INFO, WARNING, ERROR.
    level: str
    #: The message; several lines if there is a traceback.
    text: str

    @classmethod
    def now(cls, *, rank: int, host: str, level: str, text: str, at: float) -> "LogEntry":
        """Create an entry for a message logged `at` seconds after the epoch."""
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
        return cls(at=datetime.fromtimestamp(at, UTC), rank=rank, host=host, level=level, text=text)


def append(pipeline: redis.Redis, job_id: str, entries: list[LogEntry]) -> None:
    """Append entries to a job's log, with one command."""
    lines = "".join(f"{entry.model_dump_json()}\n" for entry in entries)
    pipeline.eval(_APPEND, 1, RqJob.key_for(job_id), keys.LOG_FIELD, lines, keys.LOG_BYTES)


def read(connection: redis.Redis, job_id: str) -> list[LogEntry]:
    """Read a job's log, oldest first; empty if there are no entries or no such job."""
    text = connection.hget(RqJob.key_for(job_id), keys.LOG_FIELD)
    entries = []
    for line in (text or b"").splitlines():
        try:
            entry = LogEntry.model_validate_json(line)
        except ValidationError:
            continue  # written by another version
        if 1970 <= entry.at.year <= 9000:  # other times overflow in some time zones
            entries.append(entry)
    return entries
