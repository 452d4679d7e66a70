"""What workers have logged about a job: kept with the job itself, so that it is there as long as the job is.

Capped: of a job that fails again and again the newest lines are kept. Knows no terminal.
"""

from datetime import UTC, datetime

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from rq.job import Job as RqJob

from svdq.producer import keys

#: Characters of one entry that are kept: a long traceback loses its middle.
MAX_TEXT = 4000

#: Appends lines, and cuts off whole old ones where there are too many bytes; a job that is gone stays gone.
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
    """One thing that a worker logged."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: When.
    at: datetime
    #: The rank that did, and where.
    rank: int
    host: str
    #: Python's word for how bad it is: INFO, WARNING, ERROR.
    level: str
    #: What; of several lines where there is a traceback.
    text: str

    @classmethod
    def now(cls, *, rank: int, host: str, level: str, text: str, at: float) -> "LogEntry":
        """Make an entry of something that was logged `at` seconds after the epoch."""
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 2]}\n…\n{text[-MAX_TEXT // 2 :]}"
        return cls(at=datetime.fromtimestamp(at, UTC), rank=rank, host=host, level=level, text=text)


def append(pipeline: redis.Redis, job_id: str, entries: list[LogEntry]) -> None:
    """Add entries to a job's log; one command."""
    lines = "".join(f"{entry.model_dump_json()}\n" for entry in entries)
    pipeline.eval(_APPEND, 1, RqJob.key_for(job_id), keys.LOG_FIELD, lines, keys.LOG_BYTES)


def read(connection: redis.Redis, job_id: str) -> list[LogEntry]:
    """Read a job's log, oldest first; empty when nothing was logged or there is no such job."""
    text = connection.hget(RqJob.key_for(job_id), keys.LOG_FIELD)
    entries = []
    for line in (text or b"").splitlines():
        try:
            entry = LogEntry.model_validate_json(line)
        except ValidationError:
            continue  # of another version
        if 1970 <= entry.at.year <= 9000:  # others cannot be shown in every time zone
            entries.append(entry)
    return entries
