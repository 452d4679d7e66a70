"""Reads RQ jobs that anyone with access to Redis may have written: bounded in size, and nothing in them is called.

Touches RQ's internals; `tests/worker/test_group_worker.py` fails when a new RQ changes them.
"""

import zlib
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import redis
import rq
from rq.exceptions import NoSuchJobError
from rq.job import JobStatus, validate_job_id
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.pipeline.errors import reason_of
from svdq.producer import keys

#: Bytes of a job's record, of a result, and of what a compressed field of either holds. Ours have some thousands.
MAX_BYTES: Final = 1 << 20
#: Fields of a job's record; RQ's have about 40.
MAX_FIELDS: Final = 200
#: Jobs that are read in one round trip.
AT_ONCE: Final = 500
_STATUSES = frozenset(status.value for status in JobStatus)
#: Times that RQ may have written; later arithmetic and time zones cannot handle the years at the ends of datetime.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2500, 1, 1, tzinfo=UTC)
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
#: Redis refuses to expire a key at a time that does not fit into 64 bits.
_MAX_TTL_S = 100 * 366 * keys.DAY_S

#: Reads a job's record. KEYS: job. ARGV: most fields, most bytes, then the names of the fields to read; none means all.
#: Returns nil when there is none; {nil, names, values} of its fields; or {why it is not read, its status or nil}.
_READ = """
local kind = redis.call('type', KEYS[1]).ok
if kind == 'none' then
  return nil
elseif kind ~= 'hash' then
  return {'it is a ' .. kind, false}
end
local function refuse(reason)
  return {reason, redis.call('hstrlen', KEYS[1], 'status') <= 20 and redis.call('hget', KEYS[1], 'status')}
end
local names = {unpack(ARGV, 3)}
if #names == 0 then
  if redis.call('hlen', KEYS[1]) > tonumber(ARGV[1]) then
    return refuse('it has more than ' .. ARGV[1] .. ' fields')
  end
  names = redis.call('hkeys', KEYS[1])
end
local size = 0
for _, name in ipairs(names) do
  size = size + string.len(name) + redis.call('hstrlen', KEYS[1], name)
end
if size > tonumber(ARGV[2]) then
  return refuse('it has more than ' .. ARGV[2] .. ' bytes')
end
return {false, names, redis.call('hmget', KEYS[1], unpack(names))}
"""

#: Reads the newest result of a job. KEYS: its stream of results. ARGV: most bytes.
#: Returns {id, {field, value, …}}; nil when there is none; a sentence when it is too large.
_READ_RESULT = """
local newest = redis.call('xrevrange', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not newest then
  return nil
end
local size = 0
for _, text in ipairs(newest[2]) do
  size = size + string.len(text)
end
if size > tonumber(ARGV[1]) then
  return 'its result has more than ' .. ARGV[1] .. ' bytes'
end
return newest
"""


class UnreadableJobError(NoSuchJobError):
    """The value under a job's key is not a record that RQ could have written; the message gives the reason."""

    def __init__(self, job_id: str, status: bytes | str | None, reason: Exception | str) -> None:
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason_of(reason)}"
        super().__init__(f"The record of job {job_id!r} cannot be read: {text[:200]}.")
        #: The job's id.
        self.job_id = job_id
        written = status.decode(errors="replace") if isinstance(status, bytes) else status
        #: RQ's status where the record has one, else "unknown".
        self.status = written if written in _STATUSES else "unknown"


class UntrustedJob(rq.job.Job):
    """An RQ job that calls nothing that its record names; RQ's own code uses it through `SvdqQueue`."""

    def refresh(self) -> None:
        """Read the job's record.

        Raises:
            NoSuchJobError: there is none.
            UnreadableJobError: it is too large or malformed.
        """
        answer: Any = self.connection.eval(_READ, 1, self.key, MAX_FIELDS, MAX_BYTES)
        if answer is None:
            raise NoSuchJobError(f"No such job: {self.key!r}")
        self.restore(_fields_in(self.id, answer))

    def restore(self, raw_data: Any) -> None:
        """Take the fields of the job's record.

        Raises:
            UnreadableJobError: it is malformed, or a compressed field holds too much.
        """
        try:
            for field in (b"data", b"exc_info"):
                _check_size(raw_data.get(field, b""), MAX_BYTES)
            super().restore(raw_data)
            _drop_invalid_values(self)
        except Exception as error:
            reason = error if b"data" in raw_data else "it has no data"
            raise UnreadableJobError(self.id, raw_data.get(b"status"), reason) from error

    @classmethod
    def find(cls, job_id: bytes | str, connection: redis.Redis) -> "UntrustedJob | None":
        """Read a job; None when there is none of that id that can be read."""
        return cls.fetch_many([job_id], connection)[0]

    @classmethod
    def fetch_many(  # type: ignore[override]  # takes bytes, too
        cls, job_ids: Iterable[str | bytes], connection: redis.Redis, serializer: Any = None
    ) -> list["UntrustedJob | None"]:
        """Read several jobs; None for each that cannot be read."""
        return [found if isinstance(found, cls) else None for found in read_many(connection, job_ids)]

    def latest_result(self, timeout: int = 0) -> Result | None:
        """Read the newest result; None when there is none that can be read. Does not wait."""
        found = next(read_results(self.connection, [self]))
        return found if isinstance(found, Result) else None

    def dependencies_are_met(self, parent_job: rq.job.Job | None = None, *arguments: Any, **options: Any) -> bool:
        """Return whether a job that waits for others may be queued; never if something that it names is not a job."""
        # The end of a parent queues only what still waits: a user may have queued it before, and it may have ended.
        if parent_job is not None and self.get_status(refresh=False) is not JobStatus.DEFERRED:
            return False
        try:
            return super().dependencies_are_met(parent_job, *arguments, **options)
        except (ValueError, redis.ResponseError):
            return False

    def execute_failure_callback(self, *_: Any, **__: Any) -> None:
        """Call nothing."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


def key_of(job_id: bytes | str) -> bytes:
    """Return the Redis key of a job's record; any id is allowed."""
    name = job_id if isinstance(job_id, bytes) else job_id.encode(errors="replace")
    return rq.job.Job.redis_job_namespace_prefix.encode() + name


def read_many(
    connection: redis.Redis, job_ids: Iterable[bytes | str], fields: Sequence[str] = ()
) -> Iterator[UntrustedJob | UnreadableJobError | None]:
    """Read jobs, in their order and some hundreds in a round trip; one bad record harms no other.

    Args:
        connection: to Redis.
        job_ids: any number.
        fields: read only these, `data` among them, which is faster; the others have RQ's defaults then.

    Yields:
        the job; why its record cannot be read; None when there is none.
    """
    read = connection.register_script(_READ)
    remaining = iter(job_ids)
    while chunk := list(islice(remaining, AT_ONCE)):
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in chunk:
                read([key_of(job_id)], [MAX_FIELDS, MAX_BYTES, *fields], client=pipeline)
            answers = pipeline.execute()
        for job_id, answer in zip(chunk, answers, strict=True):
            yield None if answer is None else _restored(connection, job_id, answer)


def _restored(connection: redis.Redis, job_id: bytes | str, answer: Any) -> UntrustedJob | UnreadableJobError:
    name = job_id if isinstance(job_id, str) else job_id.decode(errors="backslashreplace")
    try:
        validate_job_id(name)
        job = UntrustedJob(name, connection=connection, serializer=JSONSerializer)
        job.restore(_fields_in(name, answer))
    except UnreadableJobError as error:
        return error
    except ValueError as error:
        return UnreadableJobError(name, None, error)
    return job


def _fields_in(job_id: str, answer: Any) -> dict[bytes, bytes]:
    """Return the fields of a record that `_READ` has answered; raises UnreadableJobError."""
    reason, *content = answer
    if reason is not None:
        raise UnreadableJobError(job_id, content[0], as_text(reason))
    return {name: value for name, value in zip(*content, strict=True) if value is not None}


def read_results(connection: redis.Redis, jobs: Iterable[rq.job.Job]) -> Iterator[Result | UnreadableJobError | None]:
    """Read the newest result of each job in one round trip.

    Yields:
        the result; why it cannot be read; None when there is none.
    """
    jobs = list(jobs)
    with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            key = Result.get_key(job.id)  # type: ignore[no-untyped-call]
            pipeline.eval(_READ_RESULT, 1, key, MAX_BYTES)
        answers = pipeline.execute(raise_on_error=False)
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, redis.ConnectionError | redis.TimeoutError):
            raise answer
        try:
            yield None if answer is None else _restored_result(job, answer)
        except Exception as error:  # noqa: BLE001 - anyone can write to Redis; other jobs continue
            yield UnreadableJobError(job.id, job.get_status(refresh=False), error)


def _restored_result(job: rq.job.Job, answer: Any) -> Result:
    """Restore a result that `_READ_RESULT` has answered; malformed fields raise any exception."""
    if isinstance(answer, Exception):
        raise answer  # the key is no stream
    if not isinstance(answer, list):
        raise ValueError(as_text(answer))
    result_id, fields = answer
    payload = dict(zip(fields[::2], fields[1::2], strict=True))
    _check_size(b64decode(payload.get(b"exc_string", b"")), MAX_BYTES)
    return Result.restore(job.id, as_text(result_id), payload, connection=job.connection, serializer=job.serializer)


def _drop_invalid_values(job: rq.job.Job) -> None:
    """Drop what has the wrong type or range and is not needed: it would fail later, when the job ends."""
    # What RQ's tools have written as pickle is not JSON, and must not keep the job from being written again.
    if not isinstance(job.meta, dict) or "unserialized" in job.meta:
        job.meta = {}
    for name in _TIMES:
        moment = getattr(job, name)
        if moment is not None and not _FIRST <= moment < _LAST:
            setattr(job, name, _FIRST if name == "created_at" else None)
    for name in ("ttl", "result_ttl", "failure_ttl"):
        ttl_s = getattr(job, name)
        if ttl_s is not None and not -1 <= ttl_s <= _MAX_TTL_S:
            setattr(job, name, None)
    if not _are_seconds(job.retry_intervals):
        job.retry_intervals = None
    if not _are_seconds(job.repeat_intervals):
        job.repeat_intervals = job.repeats_left = None
    if not isinstance(job._dependency_ids, list) or not all(isinstance(name, str) for name in job._dependency_ids):
        job._dependency_ids = []


def _check_size(field: bytes, max_bytes: int) -> None:
    """Raise ValueError when a compressed field holds too much; one that is not compressed is as large as it is."""
    try:
        start = zlib.decompressobj().decompress(field, max_bytes + 1)
    except zlib.error:
        return
    if len(start) > max_bytes:
        raise ValueError(f"a compressed field holds more than {max_bytes} bytes")


def _are_seconds(intervals: Any) -> bool:
    """Whether these are intervals that RQ can add to a time."""
    return intervals is None or (
        isinstance(intervals, list)
        and all(type(seconds) is int and 0 <= seconds <= keys.FAILURE_TTL_S for seconds in intervals)
    )
