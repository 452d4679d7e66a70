"""Reads job records from Redis, which are untrusted input: one bad record does not affect the others."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import rq
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import reason_of

#: Largest size of a job's data in bytes; parameters have a few hundred.
MAX_JOB_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class UnreadableJob:
    """A job whose record in Redis is malformed."""

    #: Its id.
    id: str
    #: RQ's status if the record has one, else "unknown".
    status: str
    #: The error, as a sentence.
    error: str

    @classmethod
    def because(cls, job_id: str, status: str, error: Exception) -> "UnreadableJob":
        """Create it from the error raised by reading a record."""
        known = status if status in {known.value for known in JobStatus} else "unknown"
        reason = reason_of(error)[:200]
        return cls(id=job_id, status=known, error=f"Its record in Redis cannot be read: {reason}.")


def read_jobs(connection: redis.Redis, job_ids: Sequence[str]) -> list[rq.job.Job | UnreadableJob | None]:
    """Read several jobs in one round trip: None for missing jobs; one bad record does not affect the others."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hgetall(key_of(job_id))
        records = pipeline.execute(raise_on_error=False)
    return [_restore(connection, job_id, record) for job_id, record in zip(job_ids, records, strict=True)]


def unpacked(data: bytes) -> bytes:
    """Unpack the data of an RQ job.

    Raises:
        ValueError: the data is far larger than that of any job.
    """
    try:
        found = zlib.decompressobj().decompress(data, MAX_JOB_BYTES)
    except zlib.error:
        found = data  # uncompressed, as RQ allows
    if len(found) >= MAX_JOB_BYTES:
        raise ValueError("its data is too large")
    return found


def key_of(job_id: str) -> bytes:
    """Return the Redis key of a job's record; any id is accepted."""
    return f"{rq.job.Job.redis_job_namespace_prefix}{job_id}".encode(errors="replace")


def _restore(connection: redis.Redis, job_id: str, record: Any) -> rq.job.Job | UnreadableJob | None:
    if record == {}:
        return None
    status = record.get(b"status", b"").decode(errors="replace") if isinstance(record, dict) else ""
    try:
        if isinstance(record, Exception):
            raise record  # the key is not a hash
        if b"data" not in record:
            raise ValueError("it has no data")
        unpacked(record[b"data"])
        rq_job = rq.job.Job(job_id, connection=connection, serializer=JSONSerializer)
        rq_job.restore(record)
        rq_job.meta = rq_job.meta if isinstance(rq_job.meta, dict) else {}
        for moment in (rq_job.created_at, rq_job.started_at, rq_job.ended_at):
            if moment is not None and not 1970 <= moment.year <= 9000:
                raise ValueError(f"it has a time in the year {moment.year}")
    except Exception as error:  # noqa: BLE001 - anyone can write to Redis; other jobs must not be affected
        return UnreadableJob.because(job_id, status, error)
    return rq_job
