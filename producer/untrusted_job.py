"""Reads RQ jobs that anyone with access to Redis may have written, with size limits and without calling anything.

Uses RQ's internals; `tests/worker/test_rq_adapter.py` detects incompatible changes of RQ.
"""

import zlib
from base64 import b64decode
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Self

import redis
import rq
from rq.exceptions import NoSuchJobError
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.producer import keys

#: Largest size in bytes of a job's record, a result, and the content of a compressed field. Ours have some thousands.
MAX_BYTES: Final = 1 << 20
#: Largest number of fields in a job's record; RQ's have about 40.
MAX_FIELDS: Final = 200
#: Range of times accepted in records; arithmetic and time zones fail near the limits of datetime.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2500, 1, 1, tzinfo=UTC)
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
#: Redis refuses an expiry that does not fit into 64 bits.
_MAX_TTL_S = 100 * 366 * keys.DAY_S

#: Reads a job's record. KEYS: job. ARGV: largest number of fields, largest number of bytes.
#: Returns the record; nil if there is none; otherwise the reason why it is not read.
_READ = """
local kind = redis.call('type', KEYS[1]).ok
if kind == 'none' then
  return nil
elseif kind ~= 'hash' then
  return 'it is a ' .. kind
elseif redis.call('hlen', KEYS[1]) > tonumber(ARGV[1]) then
  return 'it has more than ' .. ARGV[1] .. ' fields'
end
local size = 0
for _, field in ipairs(redis.call('hkeys', KEYS[1])) do
  size = size + string.len(field) + redis.call('hstrlen', KEYS[1], field)
end
if size > tonumber(ARGV[2]) then
  return 'it has more than ' .. ARGV[2] .. ' bytes'
end
return redis.call('hgetall', KEYS[1])
"""

#: Reads the newest result of a job. KEYS: its stream of results. ARGV: largest number of bytes.
#: Returns {id, {field, value, …}}; nil if there is none or it is too large.
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
  return nil
end
return newest
"""


class UnreadableJobError(NoSuchJobError):
    """A key of a job contains something that RQ cannot have written; the message says why."""


class UntrustedJob(rq.job.Job):
    """An RQ job that never calls what its record names; `SvdqQueue` makes RQ's own code use it, too."""

    def refresh(self) -> None:
        """Read the job's record.

        Raises:
            NoSuchJobError: the job does not exist.
            UnreadableJobError: the record is too large or malformed.
        """
        self._take(self.connection.eval(_READ, 1, self.key, MAX_FIELDS, MAX_BYTES))

    def _take(self, answer: Any) -> None:
        """Process the answer of `_READ`; raises as `refresh`."""
        if answer is None:
            raise NoSuchJobError(f"No such job: {self.key!r}")
        if not isinstance(answer, list):
            raise UnreadableJobError(f"The record of job {self.id!r} cannot be read: {as_text(answer)}.")
        self.restore(dict(zip(answer[::2], answer[1::2], strict=True)))

    def restore(self, raw_data: Any) -> None:
        """Set the fields of the job from its record.

        Raises:
            UnreadableJobError: the record is malformed, or a compressed field is too large.
        """
        try:
            for field in (b"data", b"exc_info"):
                _check_size(raw_data.get(field, b""))
            super().restore(raw_data)
            self._drop_senseless_values()
        except Exception as error:
            missing = b"data" not in raw_data
            reason = "it has no data" if missing else f"{type(error).__name__}: {str(error)[:200]}"
            raise UnreadableJobError(f"The record of job {self.id!r} cannot be read: {reason}.") from error

    def _drop_senseless_values(self) -> None:
        """Drop optional values of a wrong type or range, which would fail later when the job ends."""
        # Pickled values from RQ's tools are not JSON, and must not prevent the job from being written again.
        if not isinstance(self.meta, dict) or "unserialized" in self.meta:
            self.meta = {}
        for name in _TIMES:
            moment = getattr(self, name)
            if moment is not None and not _FIRST <= moment < _LAST:
                setattr(self, name, _FIRST if name == "created_at" else None)
        for name in ("ttl", "result_ttl", "failure_ttl"):
            ttl_s = getattr(self, name)
            if ttl_s is not None and not -1 <= ttl_s <= _MAX_TTL_S:
                setattr(self, name, None)
        if not _are_seconds(self.retry_intervals):
            self.retry_intervals = None
        if not _are_seconds(self.repeat_intervals):
            self.repeat_intervals = self.repeats_left = None
        if not isinstance(self._dependency_ids, list) or not all(
            isinstance(name, str) for name in self._dependency_ids
        ):
            self._dependency_ids = []

    @classmethod
    def find(cls, job_id: bytes | str, connection: redis.Redis) -> Self | None:
        """Read a job; None if it does not exist or cannot be read."""
        return cls.fetch_many([job_id], connection)[0]

    @classmethod
    def fetch_many(  # type: ignore[override]  # takes bytes, too
        cls, job_ids: Iterable[str | bytes], connection: redis.Redis, serializer: Any = None
    ) -> list[Self | None]:
        """Read several jobs in one round trip; None for each that cannot be read."""
        jobs: list[Self | None] = []
        read = connection.register_script(_READ)
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                try:
                    job = cls(as_text(job_id), connection=connection, serializer=JSONSerializer)
                except (ValueError, TypeError):  # not a valid id
                    jobs.append(None)
                    continue
                jobs.append(job)
                read([job.key], [MAX_FIELDS, MAX_BYTES], client=pipeline)
            answers = iter(pipeline.execute())
        return [job if job is not None and job._is_readable(next(answers)) else None for job in jobs]

    def _is_readable(self, answer: Any) -> bool:
        try:
            self._take(answer)
        except NoSuchJobError:
            return False
        return True

    def latest_result(self, timeout: int = 0) -> Result | None:
        """Read the newest result; None if there is none or it cannot be read. Does not wait."""
        try:
            key = Result.get_key(self.id)  # type: ignore[no-untyped-call]
            newest: Any = self.connection.eval(_READ_RESULT, 1, key, MAX_BYTES)
            if newest is None:
                return None
            result_id, fields = newest
            payload = dict(zip(fields[::2], fields[1::2], strict=True))
            _check_size(b64decode(payload.get(b"exc_string", b"")))
            return Result.restore(
                self.id, as_text(result_id), payload, connection=self.connection, serializer=self.serializer
            )
        except (redis.ConnectionError, redis.TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - anyone can write to Redis; an unreadable result counts as none
            return None

    def dependencies_are_met(self, *arguments: Any, **options: Any) -> bool:
        """Return whether a waiting job may be queued; False if its dependencies are malformed."""
        try:
            return super().dependencies_are_met(*arguments, **options)
        except (ValueError, redis.ResponseError):
            return False

    def execute_failure_callback(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _check_size(field: bytes) -> None:
    """Raise ValueError if a compressed field is too large; an uncompressed one is limited by the record."""
    try:
        start = zlib.decompressobj().decompress(field, MAX_BYTES + 1)
    except zlib.error:
        return
    if len(start) > MAX_BYTES:
        raise ValueError(f"a compressed field holds more than {MAX_BYTES} bytes")


def _are_seconds(intervals: Any) -> bool:
    """Return whether these are intervals that RQ can add to a time."""
    return intervals is None or (
        isinstance(intervals, list)
        and all(type(seconds) is int and 0 <= seconds <= keys.FAILURE_TTL_S for seconds in intervals)
    )
