"""Cancels, retries and moves jobs, and pauses the queues.

Statuses are RQ's: a job that is canceled before a group has begun it becomes `canceled`, one in flight `stopped`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import redis
import rq
from redis.client import Pipeline
from rq.exceptions import InvalidJobOperation
from rq.executions import ExecutionRegistry
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.suspension import resume as rq_resume
from rq.suspension import suspend as rq_suspend
from rq.worker import Worker

from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.producer.queue import PRIORITIES, SvdqQueue, fetch, queues, read_job
from svdq.producer.status.status import ENDED
from svdq.producer.storage.storage import Storage

#: What can be done to a job.
Action = Literal["cancel", "retry", "retry --force", "move"]
#: Statuses of the jobs to which each can be done.
STATUSES_FOR: Mapping[Action, Sequence[str]] = {
    "cancel": ("queued", "started", "scheduled", "deferred"),
    "retry": ("failed", "stopped", "canceled"),
    "retry --force": ("finished", "failed", "stopped", "canceled"),
    "move": ("queued",),
}

#: Marks a job that a group has. KEYS: job, marks, the job's executions. ARGV: job id.
#: Returns 1 when it is marked, 0 when it is not started any more, -1 when it has no execution: no group has it.
_MARK = """
if redis.call('hget', KEYS[1], 'status') ~= 'started' then
  return 0
elseif redis.call('zcard', KEYS[3]) == 0 then
  return -1
end
redis.call('sadd', KEYS[2], ARGV[1])
return 1
"""

#: Moves a job within or between queues. KEYS: job, target, then all queues. ARGV: job id, target's name, front or back.
_MOVE = """
for i = 3, #KEYS do
  if redis.call('lrem', KEYS[i], 1, ARGV[1]) > 0 then
    redis.call(ARGV[3] == 'front' and 'lpush' or 'rpush', KEYS[2], ARGV[1])
    redis.call('hset', KEYS[1], 'origin', ARGV[2])
    return 1
  end
end
return 0
"""


def check(connection: redis.Redis, action: Action, job_ids: Iterable[str]) -> None:
    """Check that something can be done to all of these jobs, before it is done to the first.

    Raises:
        InputError: there is no such job, or it has a status for which it cannot.
    """
    for job_id in job_ids:
        _find(connection, action, job_id)


def _find(connection: redis.Redis, action: Action, job_id: str) -> rq.job.Job:
    """Find a job to which something is to be done; raises as `check`."""
    job = fetch(connection, job_id)
    status = job.get_status(refresh=False).value
    match action:
        case "cancel" if status in ENDED:
            raise InputError(f"Job {job_id!r} has ended already: it is {status}.")
        case "retry" if status not in STATUSES_FOR[action]:
            hint = "; --force renders it again" if status == "finished" else ""
            raise InputError(f"Job {job_id!r} is {status}: only failed, stopped and canceled jobs are retried{hint}.")
        case "retry --force" if status not in STATUSES_FOR[action]:
            raise InputError(f"Job {job_id!r} has not ended: it is {status}.")
        case "move" if status not in STATUSES_FOR[action]:
            raise InputError(f"Job {job_id!r} is {status}: only queued jobs can be moved.")
    return job


def cancel(connection: redis.Redis, job_id: str) -> str:
    """Cancel a job; return what was done: "canceled", or "stopping" when a group has it and stops at its next step.

    Raises:
        InputError: there is no such job, or it has ended.
    """
    while True:
        job = _find(connection, "cancel", job_id)
        if job.get_status(refresh=False) is JobStatus.STARTED:
            names = (job.key, keys.CANCELLED, ExecutionRegistry(job_id, connection).key)
            marked = connection.eval(_MARK, len(names), *names, job_id)
            if marked == 1:
                return "stopping"
            if marked == 0:
                continue  # it ended or went back to the queue just now
        if _in_transaction(connection, job, _cancel):
            connection.hdel(keys.CRASHES, job_id)
            return "canceled"


def _cancel(pipeline: Pipeline, job: rq.job.Job) -> None:
    """Cancel a job that no group has begun, and take it from a group that has popped it."""
    for queue in queues(job.connection):
        pipeline.lrem(queue.key, 1, job.id)
        pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
    pipeline.hdel(keys.POPPED, job.id)
    job.cancel(pipeline=pipeline)


def _in_transaction(connection: redis.Redis, job: rq.job.Job, change: Callable[[Pipeline, rq.job.Job], object]) -> bool:
    """Change a job in one step; return False when someone else has changed it since it was read.

    Raises:
        InputError: it was deleted since, or its record cannot be read any more.
    """
    status = job.get_status(refresh=False)
    with connection.pipeline() as pipeline:
        pipeline.watch(job.key)  # type: ignore[no-untyped-call]
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


def retry(connection: redis.Redis, job_id: str, *, storage: Storage | None = None) -> None:
    """Queue a failed, stopped or canceled job again: same id, same seed, at the end of its queue.

    Args:
        connection: to Redis.
        job_id: the job.
        storage: queue a finished job, too; the files in this storage stay until new ones replace them.

    Raises:
        InputError: there is no such job, or it has another status.
        UnavailableError: the storage cannot be reached.
    """
    rq_job = _find(connection, "retry" if storage is None else "retry --force", job_id)
    job = read_job(rq_job)
    if storage is not None and job is not None:
        # With it beside the files a worker would find that there is nothing left to do.
        storage.remove(f"{job.output_stem(job_id)}.json")
    _queue_again(connection, rq_job)


def _queue_again(connection: redis.Redis, job: rq.job.Job) -> None:
    def change(pipeline: Pipeline, job: rq.job.Job) -> None:
        queue = SvdqQueue(job.origin, connection=connection)
        for registry in (FailedJobRegistry, FinishedJobRegistry, CanceledJobRegistry):
            pipeline.zrem(registry(queue=queue).key, job.id)
        pipeline.srem(keys.CANCELLED, job.id)
        pipeline.hdel(keys.CRASHES, job.id)
        job.started_at = job.ended_at = job.worker_name = None
        job.retries_left = keys.MAX_RETRIES
        job.meta = {}
        queue._enqueue_job(job, pipeline=pipeline)
        pipeline.hdel(job.key, "started_at", "ended_at", "worker_name")
        pipeline.persist(job.key)  # an ended job is kept for some days only

    if not _in_transaction(connection, job, change):
        raise InputError(f"Job {job.id!r} was changed by someone else just now; look at it and try again.")


def move(connection: redis.Redis, job_id: str, *, front: bool, priority: str | None) -> None:
    """Move a queued job to the front or the end of its own queue or another one.

    Raises:
        InputError: there is no such job or priority, or it does not wait in a queue.
    """
    if priority is not None and priority not in PRIORITIES:
        raise InputError(f"There is no priority {priority!r}; choose one of {', '.join(PRIORITIES)}.")
    job = _find(connection, "move", job_id)
    target = SvdqQueue(f"svdq-{priority}" if priority else job.origin, connection=connection)
    names = (job.key, target.key, *(queue.key for queue in queues(connection)))
    if not connection.eval(_MOVE, len(names), *names, job_id, target.name, "front" if front else "back"):
        raise InputError(f"Job {job_id!r} was taken by a group just now, so it cannot be moved.")


def pause(connection: redis.Redis) -> None:
    """Have all groups take no more jobs: RQ's suspend."""
    rq_suspend(connection)


def resume(connection: redis.Redis) -> None:
    """Have all groups take jobs again, those too that paused because too much failed."""
    rq_resume(connection)
    connection.delete(keys.PAUSES)


def pauses(connection: redis.Redis) -> Sequence[str]:
    """Say why jobs are not taken, a sentence each; none when they are."""
    sentences = []
    if connection.exists(keys.SUSPENDED):
        sentences.append("Paused: no jobs are taken until `svdq resume`.")
    found: Any = connection.hgetall(keys.PAUSES)
    for worker, reason in sorted(found.items()):
        # One that died takes its reason along; the next group tries anew.
        if connection.exists(Worker.redis_worker_namespace_prefix.encode() + worker):
            name, text = (part.decode(errors="backslashreplace") for part in (worker, reason))
            sentences.append(f"PAUSED {name}: {text} Fix the cause, then run `svdq resume`.")
    return sentences
