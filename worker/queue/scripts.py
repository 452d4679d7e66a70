"""The Lua scripts of the worker, which move jobs between queue, worker and registries; a kill loses no job.

A job is in exactly one of these at any time: its queue; RQ's intermediate queue, with its owner in `svdq:popped`; RQ's
registry of executions (`rq:wip:…`); or a registry of ended jobs. Processes compare only times of the clock of Redis.
"""

import socket
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import redis
import rq
from redis.client import Pipeline
from rq.executions import Execution, ExecutionRegistry
from rq.utils import utcformat
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from svdq.producer import keys, lua
from svdq.producer.clock import CLOCK
from svdq.producer.outbox import Event
from svdq.producer.pauses import freed_field
from svdq.producer.queue import SvdqQueue
from svdq.producer.untrusted_job import key_of

FOREVER = 1e18
HAS_DEPENDENTS = 2  # the answer of while_held.lua for a job that others depend on


class QueuedJob(NamedTuple):
    """A job as a queue has it."""

    queue: SvdqQueue
    job_id: bytes
    record: dict[bytes, bytes]  # empty if there is none, or it is known
    is_canceled: bool  # while it returned to its queue
    is_suspect: bool  # of a crash: it must run alone


class Pop(NamedTuple):
    """What `pop` has found and taken."""

    paused: bool
    now_s: float  # by the clock of Redis
    jobs: list[QueuedJob]
    next: QueuedJob | None  # behind them
    num_queued: int  # behind them: this group's part of the queues


def text_of(name: bytes | str | None) -> str:
    """Decode a name that anyone may have written; no name of svdq has bytes that are not UTF-8."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name or ""


def server_time(connection: redis.Redis) -> float:
    """Read the clock of Redis, in seconds since the epoch: the one clock that all hosts share."""
    seconds, microseconds = connection.time()
    return float(seconds) + microseconds / 1e6


def is_wrong_type(error: Exception) -> bool:
    """Whether a command failed because another program has given a key of a job the wrong type."""
    return isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)


def check_answers(answers: Iterable[object]) -> None:
    """Raise the first error of a pipeline's answers, except for keys of the wrong type."""
    for answer in answers:
        if isinstance(answer, Exception) and not is_wrong_type(answer):
            raise answer


def pop(
    connection: redis.Redis,
    queues: Sequence[SvdqQueue],
    worker_name: str,
    number: int = 1,
    *,
    pause: str = "",
    known: bytes = b"",
) -> Pop:
    """Take the next jobs off the queues, most urgent first, and record their owner; see pop.lua.

    None is taken if `pause` is in keys.PAUSES, or this host is freed. The record of the next job is left out if it is
    the `known` one.
    """
    places = [
        key for each in queues for key in (each.key, each.intermediate_queue_key, WORKERS_BY_QUEUE_KEY % each.name)
    ]
    names = [keys.SUSPENDED, keys.PAUSES, keys.POPPED, keys.CANCELED, keys.CRASHES, *places]
    values = (worker_name, pause or worker_name, number, key_of(b""), known, freed_field(socket.gethostname()))
    paused, time, popped, behind, numbers = lua.run(connection, "pop", names, *values)

    def describe(place: int, job_id: bytes, record: list[bytes], is_canceled: int, is_suspect: int) -> QueuedJob:
        fields = dict(zip(record[::2], record[1::2], strict=True))
        return QueuedJob(queues[place], job_id, fields, bool(is_canceled), bool(is_suspect))

    return Pop(
        paused=bool(paused),
        now_s=int(time[0]) + int(time[1]) / 1e6,
        jobs=[describe(*job) for job in popped],
        next=next((describe(*job) for job in behind), None),
        num_queued=int(sum(num_jobs / max(1, num_workers) for num_jobs, num_workers in numbers)),
    )


def begin(pipeline: redis.Redis, worker_name: str, execution: Execution, commands: Pipeline) -> Any:
    """Begin a popped job by commands that are executed together, if the worker still owns it; as begin.lua returns."""
    names = (keys.POPPED, key_of(execution.job_id), execution.key)
    return lua.run(pipeline, "begin", names, execution.job_id, worker_name, *_words_of(commands.command_stack))


def _words_of(commands: Sequence[Any]) -> list[Any]:
    """Return commands of a pipeline, each after the number of its words."""
    return [word for words, _ in commands for word in (len(words), *words)]


def while_held(
    pipeline: redis.Redis,
    worker_name: str,
    queue: rq.Queue,
    entry: str,
    commands: Sequence[Any],
    *,
    event: Event | Literal[""] = "",
    alone: bool = False,
) -> None:
    """Execute commands together if the worker still holds a job; the answer is that of while_held.lua.

    The entry is `<job>:<execution>`, or the id of a job that is popped and not begun. With an `event` they end the job;
    with `alone`, nothing is done if other jobs depend on it.
    """
    job_id = entry.partition(":")[0]
    names = (queue.started_job_registry.key, keys.POPPED, key_of(job_id), rq.job.Job.dependents_key_for(job_id))
    lua.run(pipeline, "while_held", names, entry, worker_name, "alone" if alone else "", event, *_words_of(commands))


def drop_popped(pipeline: redis.Redis, queue: rq.Queue, job_id: bytes | str) -> None:
    """Remove a job from the popped ones."""
    pipeline.lrem(queue.intermediate_queue_key, 1, job_id)  # type: ignore[arg-type]  # redis-py's stub wants text
    pipeline.hdel(keys.POPPED, job_id)


def leave(connection: redis.Redis, worker_name: str, queue: rq.Queue, target: rq.Queue, job_id: str, for_: str) -> bool:
    """Move a popped job to the queue of other groups, where it waits `for_` something; return whether it was there."""
    names = (keys.POPPED, key_of(job_id), rq.Queue.redis_queues_keys, queue.intermediate_queue_key, target.key)
    return bool(lua.run(connection, "leave", names, job_id, worker_name, target.name, for_))


def return_to_queue(
    connection: redis.Redis, queue: rq.Queue, execution: Execution, lease_until: float = FOREVER
) -> bool:
    """Put the job of an execution back to the front of its queue, unless its lease ends later than `lease_until`."""
    job_id = execution.job_id
    registry, executions = queue.started_job_registry.key, ExecutionRegistry(job_id, connection).key
    names = (registry, execution.key, executions, queue.key, key_of(job_id))
    values = (execution.composite_key, execution.id, job_id, lease_until)
    return bool(lua.run(connection, "return_to_queue", names, *values) == 1)


def return_popped_to_queue(connection: redis.Redis, queue: rq.Queue, job_id: bytes, owner: bytes) -> bool:
    """Put a job that its owner (b"": another program) popped and did not begin back to the front of its queue."""
    names = (keys.POPPED, queue.intermediate_queue_key, queue.key, key_of(job_id))
    return bool(lua.run(connection, "return_popped_to_queue", names, job_id, owner) == 1)


def promote(pipeline: redis.Redis, queue: rq.Queue, job_ids: Sequence[bytes]) -> None:
    """Queue the jobs that are due, unless they were canceled or another group did; the answer is their number."""
    names = (queue.scheduled_job_registry.key, queue.key, *map(key_of, job_ids))
    lua.run(pipeline, "promote", names, utcformat(CLOCK.now()), *job_ids)


def set_field(pipeline: redis.Redis, job_id: str, field: str, value: str) -> None:
    """Write a field of a job that exists: HSET alone would create a job that was deleted."""
    lua.run(pipeline, "set_field", [key_of(job_id)], field, value)


def write_lease(pipeline: Pipeline, queue: rq.Queue, execution: Execution, until_s: float, lease_s: int) -> None:
    """Write an execution and its lease, which ends at `until_s` by the clock of Redis, as RQ's `Execution.create`."""
    execution.save(lease_s, pipeline=pipeline)
    pipeline.zadd(queue.started_job_registry.key, {execution.composite_key: until_s})
    # RQ keeps a job's list of its executions for a minute longer. It has one for the worker, too, which stays empty:
    # rq-dashboard 0.9 reads one of these jobs as pickle, and fails.
    executions = ExecutionRegistry(execution.job_id, pipeline)
    pipeline.zadd(executions.key, {execution.id: until_s + 60})
    pipeline.expire(executions.key, lease_s + 60)
