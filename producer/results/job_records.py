"""Reads RQ's records of jobs, whatever their ids look like; one that is malformed does not hinder the others."""

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
from svdq.producer.queue import read_job
from svdq.producer.timeparse import as_utc

#: Jobs read in one round trip.
AT_ONCE = 500
#: Bytes of a job's arguments, unpacked; ours have a few hundred.
MAX_ARGUMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What Redis knows of one job."""

    id: str
    #: In RQ's words.
    status: str
    #: When its last try ended, with a zone.
    ended_at: datetime | None
    #: Its function and arguments, as JSON.
    data: bytes

    def job(self) -> Job | None:
        """Read the job, or None when it is not one of ours."""
        rq_job = rq.job.Job(self.id, connection=redis.Redis(), serializer=JSONSerializer)  # connects to nothing
        rq_job.data = self.data
        return read_job(rq_job)


def all_job_ids(connection: redis.Redis) -> Iterator[str]:
    """Find all jobs there are, whatever queue or registry they are on their way to."""
    prefix = rq.job.Job.redis_job_namespace_prefix
    for key in connection.scan_iter(match=f"{prefix}*", count=AT_ONCE):
        job_id = key.decode(errors="replace").removeprefix(prefix)
        if ":" not in job_id:  # else what RQ keeps beside a job
            yield job_id


def read_records(
    connection: redis.Redis, job_ids: Iterable[str], on_bad: Callable[[str], None]
) -> Iterator[JobRecord | str]:
    """Read jobs, in their order; gives the id alone of a job that is not there or cannot be read.

    Args:
        connection: to Redis.
        job_ids: any number.
        on_bad: called with a sentence for each job that cannot be read.
    """
    remaining = iter(job_ids)
    while some := list(islice(remaining, AT_ONCE)):
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in some:
                pipeline.hmget(rq.job.Job.key_for(job_id), "status", "ended_at", "data")
            answers = pipeline.execute(raise_on_error=False)  # a key may be something else than a hash
        for job_id, answer in zip(some, answers, strict=True):
            try:
                yield _record(job_id, *answer)
            except (TypeError, ValueError, AttributeError):
                if answer != [None, None, None] or connection.exists(rq.job.Job.key_for(job_id)):
                    on_bad(f"The job {job_id!r} in Redis cannot be read; it is left out.")
                yield job_id


def _record(job_id: str, status: bytes, ended_at: bytes | None, data: bytes) -> JobRecord:
    with contextlib.suppress(zlib.error):  # as RQ does: what cannot be unpacked was never packed
        data = zlib.decompressobj().decompress(data, MAX_ARGUMENTS)
    return JobRecord(
        id=job_id,
        status=status.decode(),
        ended_at=as_utc(datetime.fromisoformat(ended_at.decode())) if ended_at else None,
        data=data,
    )
