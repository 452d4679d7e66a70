"""Cancels, retries and moves jobs, whose statuses are RQ's."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

import redis
import rq
from redis.client import Pipeline
from rq.exceptions import InvalidJobOperation
from rq.executions import ExecutionRegistry
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.utils import now, utcformat

from svdq.pipeline.errors import InputError
from svdq.producer import keys, lua
from svdq.producer.chains import later_links, link_before, links_without_video
from svdq.producer.outbox import tell
from svdq.producer.queue import (
    SvdqQueue,
    check_priority,
    fetch,
    fetch_many,
    is_ours,
    no_such_job,
    queue_of,
    queues,
    read_arguments,
    statuses,
)
from svdq.producer.records import REPLACED_NOTE, sidecar_digest
from svdq.producer.untrusted_job import UntrustedJob, key_of, read_many

if TYPE_CHECKING:
    from svdq.producer.storage.storage import Storage

Action = Literal["cancel", "retry", "retry --force", "move"]
WAITING = ("queued", "scheduled", "deferred", JobStatus.READY_TO_ENQUEUE.value)
GOING = ("started", *WAITING)
#: Statuses of the jobs that each action applies to.
STATUSES_FOR: Mapping[Action, Sequence[str]] = {
    "cancel": GOING,
    "retry": keys.UNRENDERED,
    "retry --force": ("finished", *keys.UNRENDERED),
    "move": ("queued",),
}
#: Why an action does not apply to a job of another status.
_REFUSALS: Mapping[Action, str] = {
    "cancel": "it has ended already",
    "retry": "only failed, stopped and canceled jobs are retried; --force renders finished ones again",
    "retry --force": "it has not ended",
    "move": "only queued jobs can be moved",
}

#: Jobs that are canceled in one transaction; Redis does nothing else meanwhile.
CANCELED_TOGETHER = 100


def check(connection: redis.Redis, action: Action, job_ids: Iterable[str]) -> list[rq.job.Job]:
    """Return the jobs if an action applies to all of them; raises InputError."""
    job_ids, jobs = list(job_ids), []
    for job_id, job in zip(job_ids, fetch_many(connection, job_ids), strict=True):
        if job is None or not is_ours(job):
            raise no_such_job(job_id)
        status = job.get_status(refresh=False).value
        if status not in STATUSES_FOR[action]:
            raise InputError(f"Job {job_id!r} is {status}: {_REFUSALS[action]}.")
        jobs.append(job)
    return jobs


def cancel(connection: redis.Redis, job_id: str) -> str:
    """Cancel a job and the rest of its chain: "canceled", or "stopping" until its next step; see `check`."""
    while True:
        (job,) = check(connection, "cancel", [job_id])
        cancel_rest(connection, [job_id])
        if job.get_status(refresh=False) is JobStatus.STARTED:
            names = (job.key, keys.CANCELED, ExecutionRegistry(job_id, connection).key)
            marked = lua.run(connection, "mark_canceled", names, job_id)
            if marked == 1:
                return "stopping"
            if marked == 0:
                continue  # it has just ended or been requeued
        if _in_transaction(connection, job, _cancel):
            connection.hdel(keys.CRASHES, job_id)
            return "canceled"


def cancel_many(connection: redis.Redis, job_ids: Iterable[str]) -> Iterator[tuple[str, str | InputError]]:
    """Cancel jobs, a hundred in a few round trips; yield the id of each with what `cancel` returns or raises.

    The jobs that continue a chain of one of them are canceled, too, and yielded first.
    """
    given = list(dict.fromkeys(job_ids))
    remaining = iter(given)
    while chunk := list(islice(remaining, CANCELED_TOGETHER)):
        for job_id in cancel_rest(connection, chunk, given):
            yield job_id, "canceled"
        canceled = _cancel_waiting(connection, chunk)
        for job_id in chunk:
            try:
                yield job_id, "canceled" if job_id in canceled else cancel(connection, job_id)
            except InputError as error:
                yield job_id, error


def cancel_waiting(connection: redis.Redis, job_ids: Iterable[str]) -> list[str]:
    """Cancel those of these jobs that have not started, with the rest of their chains; return the ids of all."""
    given = list(dict.fromkeys(job_ids))
    canceled = cancel_rest(connection, given, given, of=WAITING)
    for start in range(0, len(given), CANCELED_TOGETHER):
        chunk = given[start : start + CANCELED_TOGETHER]
        at_once = _cancel_waiting(connection, chunk)
        canceled += [job_id for job_id in chunk if job_id in at_once or _cancel_if_waiting(connection, job_id)]
    return canceled


def _cancel_waiting(connection: redis.Redis, job_ids: Sequence[str]) -> set[str]:
    """Cancel the jobs that have not started and return their ids; none if another process changes one."""
    with connection.pipeline() as pipeline:
        pipeline.watch(*map(key_of, job_ids))  # type: ignore[no-untyped-call]
        found = [job for job in read_many(connection, job_ids) if isinstance(job, UntrustedJob) and is_ours(job)]
        waiting = [job for job in found if job.get_status(refresh=False).value in WAITING]
        pipeline.multi()
        try:
            for job in waiting:
                _cancel(pipeline, job)
                pipeline.hdel(keys.CRASHES, job.id)
            pipeline.execute()
        except (redis.WatchError, InvalidJobOperation):
            return set()
    return {job.id for job in waiting}


def cancel_rest(
    connection: redis.Redis, job_ids: Iterable[str], given: Collection[str] = (), *, of: Collection[str] = GOING
) -> list[str]:
    """Cancel what continues chains of jobs of these statuses, last links first, so that a kill leaves none waiting."""
    later = {job_id: origin for job_id, origin in later_links(connection, job_ids).items() if job_id not in given}
    found = dict(zip(later, statuses(connection, list(later.values())), strict=True))
    canceled = []
    for job_id, origin in reversed(later.items()):
        if found[job_id] not in of:
            continue
        reason = f"Job {origin}, an earlier link of its chain, was canceled; `svdq retry {origin}` continues the chain."
        if _cancel_if_waiting(connection, job_id, reason):
            canceled.append(job_id)
    return canceled


def _cancel_if_waiting(connection: redis.Redis, job_id: str, reason: str = "") -> bool:
    """Cancel a job unless it has started; return whether it was canceled."""
    while (job := UntrustedJob.find(job_id, connection)) and job.get_status(refresh=False).value in WAITING:
        if _in_transaction(connection, job, partial(_cancel, reason=reason)):
            return True
    return False


def _cancel(pipeline: Pipeline, job: rq.job.Job, reason: str = "") -> None:
    """Do what RQ's `Job.cancel` does in one question; take the job from a group that has popped it."""
    for queue in queues(job.connection):
        pipeline.lrem(queue.key, 1, job.id)
        pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
        if queue.name == job.origin:
            pipeline.zrem(queue.scheduled_job_registry.key, job.id)
            pipeline.zrem(queue.deferred_job_registry.key, job.id)
            pipeline.zrem(queue.ready_job_registry.key, job.id)
            CanceledJobRegistry(queue=queue).add(job, pipeline=pipeline)
    pipeline.hdel(keys.POPPED, job.id)
    pipeline.hset(job.key, "ended_at", utcformat(now()))  # RQ does not record when
    if reason:
        pipeline.hset(job.key, "meta", job.serializer.dumps({"canceled": reason}))
    job.set_status(JobStatus.CANCELED, pipeline=pipeline)
    tell(pipeline, "video.failed", job.id)


def _in_transaction(
    connection: redis.Redis,
    job: rq.job.Job,
    change: Callable[[Pipeline, rq.job.Job], object],
    others: Sequence[str] = (),
) -> bool:
    """Change a job atomically; return False if another process has changed it, or `others` meanwhile."""
    status = job.get_status(refresh=False)
    with connection.pipeline() as pipeline:
        pipeline.watch(job.key, *map(key_of, others))  # type: ignore[no-untyped-call]
        job = fetch(connection, job.id)
        if job.get_status(refresh=False) is not status:
            return False
        pipeline.multi()
        try:
            change(pipeline, job)
            pipeline.execute()
        except (redis.WatchError, InvalidJobOperation):
            return False
    return True


def retry(
    connection: redis.Redis,
    job_id: str,
    *,
    storage: "Storage | None" = None,
    priority: str | None = None,
    at: datetime | None = None,
    after: Sequence[str] = (),
) -> list[str]:
    """Requeue a failed, stopped or canceled job: same id and seed, at the end of its queue or the queue of a priority.

    With a storage, a finished job is requeued, too; its files in this storage stay until new ones replace them. With a
    time, which has a zone, it is queued then; with ids of jobs, when these have finished or failed. The links of its
    chain that have ended without a video are requeued with it, each after the one before; returns the ids of all.
    Raises as `check`, and UnavailableError for the storage.
    """
    action: Action = "retry" if storage is None else "retry --force"
    (rq_job,) = check(connection, action, [job_id])

    def retried(links: Iterable[str]) -> Iterator[str]:
        for link in links:
            with contextlib.suppress(InputError):  # it has no need, or another process has just changed it
                _retry(connection, link, "retry")
                yield link

    before = list(retried(links_without_video(connection, rq_job)))
    _retry(connection, job_id, action, storage=storage, priority=priority, at=at, after=after)
    return [*before, job_id, *retried(later_links(connection, [job_id]))]


def retry_many(
    connection: redis.Redis, job_ids: Iterable[str], *, storage: "Storage | None" = None
) -> Iterator[tuple[str, str | InputError]]:
    """Retry jobs; yield the id of each with "queued", or what `retry` raises, first those queued with it."""
    done: set[str] = set()
    for job_id in job_ids:
        try:
            requeued = [] if job_id in done else retry(connection, job_id, storage=storage)
        except InputError as error:
            yield job_id, error
        else:
            done.update(requeued)
            for each in requeued:
                yield each, "queued"


def _retry(
    connection: redis.Redis,
    job_id: str,
    action: Action,
    *,
    storage: "Storage | None" = None,
    priority: str | None = None,
    at: datetime | None = None,
    after: Sequence[str] = (),
) -> None:
    (rq_job,) = check(connection, action, [job_id])
    before = list(filter(None, [link_before(rq_job)]))
    notes: Mapping[str, str] = {}
    if storage is not None and (arguments := read_arguments(rq_job)) is not None:
        # A worker that finds any other sidecar beside the files treats the job as done.
        for _, data in storage.read_many([arguments.job.sidecar_key(job_id)]):
            notes = arguments.notes | {REPLACED_NOTE: sidecar_digest(data)}

    def change(pipeline: Pipeline, job: rq.job.Job) -> None:
        queue = SvdqQueue(job.origin, connection=connection)
        for registry in (FailedJobRegistry, FinishedJobRegistry, CanceledJobRegistry):
            pipeline.zrem(registry(queue=queue).key, job.id)
        pipeline.srem(keys.CANCELED, job.id)
        pipeline.hdel(keys.CRASHES, job.id)
        job.started_at = job.ended_at = job.worker_name = job.last_heartbeat = None
        job.retries_left = keys.MAX_RETRIES
        job.meta = {}
        if notes:
            job.kwargs = job.kwargs | {"notes": notes}
        queue = _queue_for(job, priority)
        job.origin = queue.name
        job._dependency_ids = list({*unfinished(connection, after), *_going(connection, before)})
        if at is None and not job._dependency_ids:
            queue._enqueue_job(job, pipeline=pipeline)
        else:
            job.set_status(JobStatus.DEFERRED if at is None else JobStatus.SCHEDULED, pipeline=pipeline)
            job.allow_dependency_failures = True
            job.save(pipeline=pipeline)
            pipeline.sadd(queue.redis_queues_keys, queue.key)
            if at is None:
                job.register_dependency(pipeline=pipeline)
            else:
                pipeline.zadd(queue.scheduled_job_registry.key, {job.id: in_seconds(at)})
        pipeline.hdel(job.key, "started_at", "ended_at", "worker_name", keys.FRONT_FIELD)
        pipeline.persist(job.key)  # ended jobs expire

    while not _in_transaction(connection, rq_job, change, (*after, *before)):
        (rq_job,) = check(connection, action, [job_id])  # changed, perhaps by its group, which writes the last progress


def _going(connection: redis.Redis, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs that wait or are in flight."""
    return [job_id for job_id, status in zip(job_ids, statuses(connection, job_ids), strict=True) if status in GOING]


def unfinished(connection: redis.Redis, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs that have not ended, as RQ would wait forever for failed ones; raises InputError if canceled."""
    pending_ids = []
    for job_id in job_ids:
        status = fetch(connection, job_id).get_status(refresh=False)
        if status in (JobStatus.CANCELED, JobStatus.STOPPED):
            raise InputError(
                f"Job {job_id!r} is {status.value}, so nothing can come after it; `svdq retry` it first, or leave out "
                "--depends-on."
            )
        if status not in (JobStatus.FINISHED, JobStatus.FAILED):
            pending_ids.append(job_id)
    return pending_ids


def in_seconds(at: datetime) -> int:
    """Round a time up to whole seconds since the epoch, as RQ stores it, so that no job is due early."""
    return -int(-at.timestamp() // 1)


def queue_now(connection: redis.Redis, job_id: str) -> None:
    """Queue a scheduled job at once; nothing happens to a job with another status."""

    def change(pipeline: Pipeline, job: rq.job.Job) -> None:
        queue = SvdqQueue(job.origin, connection=connection)
        pipeline.zrem(queue.scheduled_job_registry.key, job.id)
        queue._enqueue_job(job, pipeline=pipeline)

    while (job := fetch(connection, job_id)).get_status(refresh=False) is JobStatus.SCHEDULED:
        if _in_transaction(connection, job, change):
            return


def move(connection: redis.Redis, job_id: str, *, front: bool, priority: str | None) -> None:
    """Move a queued job to the front or the end of its queue or another one; raises as `check`."""
    if priority is not None:
        check_priority(priority)
    (job,) = check(connection, "move", [job_id])
    _move(job, _queue_for(job, priority), "lpush" if front else "rpush", job_id)


def place(connection: redis.Redis, job_id: str, before: str) -> None:
    """Move a queued job before another one, with the priority of that; raises as `check`."""
    job, other = check(connection, "move", [job_id, before])
    target = SvdqQueue(other.origin, connection=connection)
    own = _queue_for(job)
    if (target.model, target.unable) != (own.model, own.unable):
        raise InputError(f"Job {job_id!r} waits for other workers than {before!r}, so it waits in another queue.")
    _move(job, target, "linsert", "before", before, job_id)


def _queue_for(job: rq.job.Job, priority: str | None = None) -> SvdqQueue:
    """Return the queue of a job, or the queue of another priority for the same groups."""
    queue = SvdqQueue(job.origin, connection=job.connection)
    return queue_of(job.connection, priority, queue.model, queue.unable) if priority else queue


def _move(job: rq.job.Job, target: SvdqQueue, *command: str) -> None:
    names = (job.key, target.key, *(queue.key for queue in queues(job.connection)))
    job.connection.sadd(SvdqQueue.redis_queues_keys, target.key)
    if not lua.run(job.connection, "move", names, job.id, target.name, *command):
        raise InputError(f"Job {job.id!r} was taken by a group just now, so it cannot be moved.")
