"""Enqueues jobs in RQ's queues, many per round trip: at once, at a set time, or after other jobs.

Each job is enqueued atomically and only once.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import redis
import rq
from redis import WatchError
from rq.exceptions import NoSuchJobError
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import as_text, now

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job
from svdq.producer.queue import fetch, new_rq_job, queue_of

#: Number of jobs sent to Redis in one round trip and held in memory at a time.
CHUNK = 500

#: RQ's own script for unique jobs takes one job at a time and returns nothing about an existing job.
#: KEYS: job, rq:queues, queue or registry of scheduled jobs. ARGV: job id, queue, when it is due or "", then the fields
#: of the job and their values. Returns the fields of the job that is there already, or nothing.
_ENQUEUE = """
if redis.call('exists', KEYS[1]) == 1 then
  return redis.call('hgetall', KEYS[1])
end
redis.call('hset', KEYS[1], unpack(ARGV, 4))
redis.call('sadd', KEYS[2], ARGV[2])
if ARGV[3] == '' then
  redis.call('rpush', KEYS[3], ARGV[1])
else
  redis.call('zadd', KEYS[3], ARGV[3], ARGV[1])
end
return {}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job to be enqueued."""

    #: The job.
    job: Job
    #: Its id.
    job_id: str
    #: The path of its photo, for display.
    photo: str = ""
    #: The priority, which selects the queue.
    priority: str = "default"
    #: When to queue it, with a time zone; None means at once.
    at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Enqueued:
    """The outcome of enqueuing an entry."""

    #: The job with this id: the new one or the existing one.
    rq_job: rq.job.Job
    #: Whether it is new.
    is_new: bool


def enqueue_many(connection: redis.Redis, entries: Sequence[Entry]) -> list[Enqueued]:
    """Enqueue jobs in one round trip, except those whose id exists.

    A kill in between neither loses nor duplicates jobs: each job is enqueued completely or not at all, and the rest can
    be enqueued again.
    """
    script = connection.register_script(_ENQUEUE)
    rq_jobs = []
    with connection.pipeline(transaction=False) as pipeline:
        for entry in entries:
            queue = queue_of(connection, entry.priority)
            rq_job = new_rq_job(queue, entry.job, entry.job_id, photo=entry.photo, is_scheduled=entry.at is not None)
            if entry.at is None:
                rq_job.enqueued_at = now()
            place, due = (queue.key, "") if entry.at is None else (queue.scheduled_job_registry.key, _seconds(entry.at))
            mapping = [part for pair in rq_job.to_dict().items() for part in pair]
            script([rq_job.key, queue.redis_queues_keys, place], [rq_job.id, queue.key, due, *mapping], pipeline)
            rq_jobs.append(rq_job)
        answers = pipeline.execute()
    return [_enqueued(connection, rq_job, answer) for rq_job, answer in zip(rq_jobs, answers, strict=True)]


def _enqueued(connection: redis.Redis, rq_job: rq.job.Job, found: list[bytes]) -> Enqueued:
    if not found:
        return Enqueued(rq_job=rq_job, is_new=True)
    there = rq.job.Job(rq_job.id, connection=connection, serializer=JSONSerializer)
    there.restore(dict(zip(map(as_text, found[::2]), found[1::2], strict=True)))
    return Enqueued(rq_job=there, is_new=False)


def _seconds(at: datetime) -> int:
    """Round a time up to whole seconds since the epoch, as RQ stores it, so that no job is due early."""
    return -int(-at.timestamp() // 1)


def enqueue_after(connection: redis.Redis, entry: Entry, parent_ids: Sequence[str]) -> Enqueued:
    """Enqueue a job, unless its id exists, as soon as other jobs have finished or failed.

    As in RQ, a canceled job keeps its dependents waiting until it is retried or they are canceled.

    Raises:
        InputError: another job does not exist or is canceled.
    """
    queue = queue_of(connection, entry.priority)
    key = rq.job.Job.key_for(entry.job_id)
    parent_keys = list(map(rq.job.Job.key_for, parent_ids))
    while True:
        with connection.pipeline() as pipeline, contextlib.suppress(WatchError, NoSuchJobError):
            pipeline.watch(key, *parent_keys)  # type: ignore[no-untyped-call]
            if connection.exists(key):
                there = rq.job.Job.fetch(entry.job_id, connection=connection, serializer=JSONSerializer)
                return Enqueued(rq_job=there, is_new=False)
            waits_for = unfinished(connection, parent_ids)
            rq_job = new_rq_job(queue, entry.job, entry.job_id, photo=entry.photo, after=waits_for)
            queue.enqueue_job(rq_job, pipeline=pipeline)
            pipeline.execute()
            return Enqueued(rq_job=rq_job, is_new=True)


def unfinished(connection: redis.Redis, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs that have not ended; RQ would wait forever for a job that has already failed.

    Raises:
        InputError: a job does not exist or is canceled.
    """
    waits_for = []
    for job_id in job_ids:
        status = fetch(connection, job_id).get_status(refresh=False)
        if status in (JobStatus.CANCELED, JobStatus.STOPPED):
            raise InputError(
                f"Job {job_id!r} is {status.value}, so nothing can come after it; `svdq retry` it first, or leave out "
                "--after."
            )
        if status not in (JobStatus.FINISHED, JobStatus.FAILED):
            waits_for.append(job_id)
    return waits_for
