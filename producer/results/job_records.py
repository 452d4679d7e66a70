"""Reads RQ's records of jobs; a malformed record does not affect the others."""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

import redis
import rq
from rq.serializers import JSONSerializer

from svdq.producer.job import Job
from svdq.producer.moments import as_utc
from svdq.producer.queue import read_job

#: Number of jobs read in one round trip.
AT_ONCE = 500
#: Largest size of a job's unpacked arguments in bytes; ours have a few hundred.
MAX_ARGUMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The record of one job in Redis."""

    id: str
    #: RQ's status.
    status: str
    #: When its last attempt ended, with a time zone.
    ended_at: datetime | None
    #: Its function and arguments as JSON.
    data: bytes

    def job(self) -> Job | None:
        """Return the job, or None if it is not a job of svdq."""
        rq_job = rq.job.Job(self.id, connection=redis.Redis(), serializer=JSONSerializer)  # does not connect
        rq_job.data = self.data
        return read_job(rq_job)


def all_job_ids(connection: redis.Redis) -> Iterator[str]:
    """Yield the ids of all jobs, including jobs on their way between a queue and a registry."""
    prefix = rq.job.Job.redis_job_namespace_prefix
    for key in connection.scan_iter(match=f"{prefix}*", count=AT_ONCE):
        job_id = key.decode(errors="replace").removeprefix(prefix)
        if ":" not in job_id:  # other keys are RQ's additional data of a job
            yield job_id


def read_records(
    connection: redis.Redis, job_ids: Iterable[str], on_bad: Callable[[str], None]
) -> Iterator[JobRecord | str]:
    """Read jobs in the given order; a missing or unreadable job has only its id.

    Args:
        connection: to Redis.
        job_ids: ids of the jobs.
        on_bad: called with a sentence for each job that cannot be read.
    """
    remaining = iter(job_ids)
    while some := list(islice(remaining, AT_ONCE)):
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in some:
                pipeline.hmget(rq.job.Job.key_for(job_id), "status", "ended_at", "data")
            answers = pipeline.execute(raise_on_error=False)  # a key may have a type other than hash
        for job_id, answer in zip(some, answers, strict=True):
            try:
                yield _record(job_id, *answer)
            except (TypeError, ValueError, AttributeError):
                if answer != [None, None, None] or connection.exists(rq.job.Job.key_for(job_id)):
                    on_bad(f"The job {job_id!r} in Redis cannot be read; it is left out.")
                yield job_id


def _record(job_id: str, status: bytes, ended_at: bytes | None, data: bytes) -> JobRecord:
    with contextlib.suppress(zlib.error):  # as in RQ: data that cannot be unpacked was not packed
        data = zlib.decompressobj().decompress(data, MAX_ARGUMENTS)
    return JobRecord(
        id=job_id,
        status=status.decode(),
        ended_at=as_utc(datetime.fromisoformat(ended_at.decode())) if ended_at else None,
        data=data,
    )
