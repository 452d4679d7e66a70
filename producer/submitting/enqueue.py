"""Enqueues jobs in RQ's queues, each atomically and once: at once, at a set time, or after other jobs."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import redis
import rq
from redis import WatchError
from rq.exceptions import NoSuchJobError
from rq.job import Dependency, JobStatus
from rq.utils import now

from svdq.pipeline.errors import InputError
from svdq.producer import keys, lua
from svdq.producer.chains import record_link
from svdq.producer.job import JobArguments
from svdq.producer.job_control import in_seconds, retry, unfinished
from svdq.producer.outbox import tell
from svdq.producer.queue import RENDER, SvdqQueue, fetch, fetch_many, queue_of, read_job
from svdq.producer.submitting.entries import Entry, Submission
from svdq.producer.untrusted_job import key_of

CHUNK = 500  # number of jobs sent to Redis in one round trip


def enqueue_many(connection: redis.Redis, entries: Sequence[Entry]) -> list[Submission]:
    """Enqueue jobs in one round trip; of those whose id exists, only the failed and canceled ones are queued again.

    A kill in between loses and duplicates nothing: each job is enqueued atomically, and the rest can be enqueued again.
    Raises InputError if an id is taken by a record that cannot be read, or a video that is to be upscaled is being
    removed; the other jobs are enqueued.
    """
    script = connection.register_script(lua.source("enqueue"))
    rq_jobs = []
    with connection.pipeline(transaction=False) as pipeline:
        for entry in entries:
            queue = queue_of(connection, entry.priority, entry.job.model)
            rq_job = new_rq_job(queue, entry)
            if entry.at is None:
                rq_job.enqueued_at = now()
                place, due = queue.key, ""
            else:
                place, due = queue.scheduled_job_registry.key, str(in_seconds(entry.at))
            mapping = [part for pair in rq_job.to_dict().items() for part in pair]
            names = [rq_job.key, queue.redis_queues_keys, place]
            if original := entry.job.original:
                names += [f"{keys.REMOVING}{original}", f"{keys.NEEDED}{original}"]
            # As long as a job may be retried, it needs the video that it upscales.
            script(names, [rq_job.id, queue.key, due, keys.FAILURE_TTL_S, *mapping], pipeline)
            rq_jobs.append(rq_job)
        are_new = pipeline.execute()
    added: dict[str, list[str]] = {}
    for entry, rq_job, is_new in zip(entries, rq_jobs, are_new, strict=True):
        if is_new > 0 and entry.at is None:
            added.setdefault(rq_job.origin, []).append(entry.job_id)
    for name, job_ids in added.items():  # a kill before this leaves them at the end of their queue
        SvdqQueue(name, connection=connection).take_turns(job_ids)
    known = fetch_many(connection, [entry.job_id for entry, is_new in zip(entries, are_new, strict=True) if not is_new])
    made = []
    for entry, rq_job, is_new in zip(entries, rq_jobs, are_new, strict=True):
        if is_new < 0:
            raise being_removed(entry.job.original)
        found = rq_job if is_new else next(known)
        if found is None:  # it has been deleted since
            made += enqueue_many(connection, [entry])
        else:
            made.append(_new(entry, rq_job) if is_new else _queue_again(connection, entry, found))
    return made


def being_removed(job_id: str) -> InputError:
    """Create the error for a job that needs a video which somebody removes just now."""
    return InputError(f"The video of job {job_id!r} is being removed, so nothing can be made of it.")


def enqueue_chain(connection: redis.Redis, links: Sequence[Entry]) -> list[Submission]:
    """Enqueue the links of a chain, or one job, which may be after other jobs; raises as `enqueue_after`."""
    done: list[Submission] = []
    for entry in links:
        if done:  # their files are beside each other
            beside = {"name": done[-1].job.name, "folder": done[-1].job.folder}
            entry = replace(entry, job=entry.job.model_copy(update=beside))
        done += [enqueue_after(connection, entry)] if entry.after else enqueue_many(connection, [entry])
    return done


def _new(entry: Entry, rq_job: rq.job.Job) -> Submission:
    return Submission(entry=entry, job=entry.job, status=rq_job.get_status(refresh=False).value, is_new=True)


def _queue_again(connection: redis.Redis, entry: Entry, existing: rq.job.Job) -> Submission:
    was, status = "", existing.get_status(refresh=False).value
    if status in keys.UNRENDERED:
        with contextlib.suppress(InputError):  # another process has just changed it
            retry(connection, existing.id, priority=entry.priority, at=entry.at, after=entry.after)
            was, existing = status, fetch(connection, existing.id)
    recorded = read_job(existing)
    if recorded is None:
        raise InputError(f"Job {entry.job_id} is in Redis but its parameters cannot be read; submit with --force.")
    status = existing.get_status(refresh=False).value
    return Submission(entry=entry, job=recorded, status=status, is_new=bool(was), was=was)


def new_rq_job(queue: SvdqQueue, entry: Entry, *, after: Sequence[str] = ()) -> rq.job.Job:
    """Create an RQ job, without writing it; it is queued when the jobs in `after` have finished or failed."""
    job = entry.job
    size = f" {job.width}x{job.height}" if job.width and job.height else ""
    arguments = JobArguments(job=job, photo=entry.photo, notes=dict(entry.notes))
    rq_job = queue.create_job(
        RENDER,
        kwargs=arguments.model_dump(mode="json"),
        job_id=entry.job_id,
        status=JobStatus.SCHEDULED if entry.at else JobStatus.QUEUED,
        depends_on=Dependency(jobs=list(after), allow_failure=True) if after else None,
        timeout=keys.JOB_TIMEOUT_S,
        retry=rq.Retry(max=keys.MAX_RETRIES),
        result_ttl=keys.RESULT_TTL_S,
        failure_ttl=keys.FAILURE_TTL_S,
        description=f"svdq {job.name}{size}",
    )
    rq_job.owner = entry.owner  # type: ignore[attr-defined]  # an UntrustedJob
    return rq_job


def enqueue_after(connection: redis.Redis, entry: Entry) -> Submission:
    """Enqueue a job as `enqueue_many` does, but as soon as the jobs in `Entry.after` have finished or failed.

    As in RQ, a canceled job keeps the jobs after it waiting, until it is retried or they are canceled. Raises
    InputError if there is no such other job, it is canceled already, or the id is taken by an unreadable record.
    """
    queue = queue_of(connection, entry.priority, entry.job.model)
    while True:
        with connection.pipeline() as pipeline, contextlib.suppress(WatchError, NoSuchJobError):
            pipeline.watch(*map(key_of, (entry.job_id, *entry.after)))  # type: ignore[no-untyped-call]
            (existing,) = fetch_many(connection, [entry.job_id])
            if existing is not None:
                return _queue_again(connection, entry, existing)
            if entry.job.predecessor:
                pipeline.watch(f"{keys.REMOVING}{entry.job.predecessor}")  # type: ignore[no-untyped-call]
                if connection.exists(f"{keys.REMOVING}{entry.job.predecessor}"):
                    raise being_removed(entry.job.predecessor)
            pending_ids = unfinished(connection, entry.after)
            rq_job = new_rq_job(queue, entry, after=pending_ids)
            queue.enqueue_job(rq_job, pipeline=pipeline)
            if entry.job.predecessor:
                record_link(pipeline, entry.job.predecessor, entry.job_id)
            tell(pipeline, "video.created", entry.job_id)
            pipeline.execute()
            return _new(entry, rq_job)
