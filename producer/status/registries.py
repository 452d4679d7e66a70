"""Counts and lists jobs by RQ status without reading them.

The number of round trips does not depend on the number of kept jobs. Never runs RQ's clean-up, which may call
functions that anyone with write access to Redis can name.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, cast

import redis
from pydantic import BeforeValidator, Field
from redis.client import Pipeline
from redis.exceptions import NoPermissionError
from rq.job import Job
from rq.registry import BaseRegistry
from rq.worker import Worker

from svdq.producer import keys, lua
from svdq.producer.connection import make_database_id
from svdq.producer.keys import STATUSES
from svdq.producer.queue import SvdqQueue, is_queue, queues, queues_of
from svdq.producer.records import Record
from svdq.producer.together import Read, ask_one, checked, together


def read_queues(connection: redis.Redis) -> Read[list[SvdqQueue]]:
    """Read our queues."""
    return queues_of(connection, *checked((yield lambda pipeline: pipeline.smembers(SvdqQueue.redis_queues_keys))))


def counts(connection: redis.Redis) -> dict[str, dict[str, int]]:
    """Count the jobs of every queue by status."""
    return ask_one(connection, read_counts(connection))


def read_counts(connection: redis.Redis) -> Read[dict[str, dict[str, int]]]:
    """Count the jobs of every queue by status; what some workers leave to others counts where it was queued."""
    found_queues = yield from read_queues(connection)
    asked = []

    def put(pipeline: Pipeline) -> None:
        for queue in found_queues:
            pipeline.llen(queue.key)
            pipeline.llen(queue.intermediate_queue_key)
            asked.extend([(queue.name, "queued")] * 2)
            for status, registry in _registries(queue):
                pipeline.zcard(registry.key)
                asked.append((queue.name, status))
            _find_stopped(pipeline, queue)
            asked.append((queue.name, "stopped"))

    answers = checked((yield put))
    found: dict[str, dict[str, int]] = {}
    for (name, status), answer in zip(asked, answers, strict=True):
        number = len(answer) if status == "stopped" else answer
        of_all = name.partition("/")[0].removesuffix(":")
        found.setdefault(of_all, dict.fromkeys(STATUSES, 0))[status] += number
    for of_queue in found.values():
        of_queue["failed"] -= of_queue["stopped"]
    # That of a model stays in RQ's list without jobs.
    return {name: of_queue for name, of_queue in found.items() if name in keys.QUEUE_NAMES or any(of_queue.values())}


def read_several_owners() -> Read[bool]:
    """Read whether jobs of more than one owner were ever submitted."""
    (number,) = checked((yield lambda pipeline: pipeline.scard(keys.OWNERS)))
    return bool(number > 1)


def _read_time() -> Read[tuple[int, int]]:
    (answer,) = checked((yield lambda pipeline: pipeline.time()))
    return cast(tuple[int, int], answer)


def num_ended(connection: redis.Redis, last_s: float) -> Read[tuple[int, int]]:
    """Count the jobs that finished and that failed in the last seconds, by the clock of Redis."""
    found, (now_s, _) = yield from together(read_queues(connection), _read_time())
    since = now_s - last_s

    def put(pipeline: Pipeline) -> None:
        for queue in found:
            pipeline.zcount(queue.finished_job_registry.key, since + keys.RESULT_TTL_S, "+inf")
            pipeline.zcount(queue.failed_job_registry.key, since + keys.FAILURE_TTL_S, "+inf")
            _find_stopped(pipeline, queue, since + keys.FAILURE_TTL_S)

    answers = checked((yield put))
    return sum(answers[::3]), sum(answers[1::3]) - sum(map(len, answers[2::3]))


def newest_ids(
    connection: redis.Redis, limit: int = 2**31, statuses: Sequence[str] = (), *, oldest: bool = False
) -> list[str]:
    """Return ids of up to `limit` of the newest jobs, or the `oldest`, of every status and queue, in no order."""
    return ask_one(connection, read_newest_ids(connection, limit, statuses, oldest=oldest))


def read_newest_ids(
    connection: redis.Redis, limit: int, statuses: Sequence[str], *, oldest: bool = False
) -> Read[list[str]]:
    """Read the same."""
    first, last = (0, limit - 1) if oldest else (-limit, -1)
    wanted = set(statuses or STATUSES)
    entries: list[bytes] = []
    found_queues = yield from read_queues(connection)

    def put(pipeline: Pipeline) -> None:
        for queue in found_queues:
            if "queued" in wanted:
                pipeline.lrange(queue.key, first, last)
                pipeline.lrange(queue.intermediate_queue_key, first, last)
            for status, registry in _registries(queue):
                if status in wanted and (status != "failed" or "stopped" in wanted):
                    pipeline.zrange(registry.key, 0, limit - 1, desc=not oldest)

    def put_halves(pipeline: Pipeline) -> None:
        for queue in found_queues:
            pipeline.zrange(queue.failed_job_registry.key, 0, -1, desc=True)
            _find_stopped(pipeline, queue)

    for answer in checked((yield put)):
        entries += answer
    if len(wanted & {"failed", "stopped"}) == 1:  # one half of a registry
        halves = checked((yield put_halves))
        for both, stopped in zip(halves[::2], halves[1::2], strict=True):
            others = set(stopped)
            found = stopped if "stopped" in wanted else [job_id for job_id in both if job_id not in others]
            entries += found[:limit]
    # An entry of a started job is `<id>:<execution>`.
    return list(dict.fromkeys(entry.decode(errors="backslashreplace").partition(":")[0] for entry in entries))


def ended_before(
    connection: redis.Redis, statuses: Sequence[str], limit: int, before: tuple[int, str] | None = None
) -> list[tuple[int, str]]:
    """Return the jobs that ended last, the newest first: when, in seconds since the epoch, and their ids.

    The statuses are of finished, failed, with stopped ones, and canceled; with an entry, only jobs `before` it.
    """
    ttls_s = {"finished": keys.RESULT_TTL_S, "failed": keys.FAILURE_TTL_S, "canceled": 0}
    found: list[tuple[int, str]] = []
    for status in statuses:
        ttl_s = ttls_s[status]
        newest = "+inf" if before is None else before[0] + ttl_s
        with connection.pipeline(transaction=False) as pipeline:
            for queue in queues(connection):
                key = dict(_registries(queue))[status].key
                # Those of the same second are sorted by id, so all of them are needed.
                if before is not None:
                    pipeline.zrangebyscore(key, newest, newest, withscores=True)
                pipeline.zrevrangebyscore(
                    key, f"({newest}" if before else newest, "-inf", start=0, num=limit, withscores=True
                )
            for answer in pipeline.execute():
                found += [(int(score) - ttl_s, job_id.decode(errors="backslashreplace")) for job_id, score in answer]
    return sorted((entry for entry in found if before is None or entry < before), reverse=True)[:limit]


def scan_ids(connection: redis.Redis) -> Iterator[bytes]:
    """Find all jobs there are, whatever queue or registry they are on their way to."""
    prefix = Job.redis_job_namespace_prefix.encode()
    for key in connection.scan_iter(match=prefix + b"*", count=500):
        job_id = key.removeprefix(prefix)
        if b":" not in job_id:  # else what RQ keeps beside a job
            yield job_id


def read_num_ahead(connection: redis.Redis, places: Mapping[str, str]) -> Read[dict[str, int]]:
    """Count the jobs taken before queued ones, by id; `places` are names of queues by id. Omits jobs that left."""
    found = {queue.name: queue for queue in (yield from read_queues(connection))}
    places = {job_id: name for job_id, name in places.items() if name in found}

    def put(pipeline: Pipeline) -> None:
        for queue in found.values():
            pipeline.llen(queue.key)
        for job_id, name in places.items():
            pipeline.lpos(found[name].key, job_id)

    answers = checked((yield put))
    lengths = dict(zip(found, answers, strict=False))

    def begin(name: str) -> int:
        """Count the jobs of more urgent queues, without those that are for other models or groups."""
        before = itertools.takewhile(lambda other: other != name, found)
        own = found[name]
        return sum(
            lengths[each]
            for each in before
            if found[each].model in ("", own.model) and found[each].unable <= own.unable
        )

    begins = {name: begin(name) for name in set(places.values())}
    positions = zip(places.items(), answers[len(found) :], strict=True)
    return {job_id: begins[name] + position for (job_id, name), position in positions if position is not None}


def read_sample(connection: redis.Redis, number: int, num_slices: int) -> Read[list[str]]:
    """Read the ids of a number of queued jobs, taken evenly from each queue in slices."""
    names = [queue.key for queue in (yield from read_queues(connection))]
    (found,) = checked((yield lambda pipeline: lua.run(pipeline, "sample_queued", names, number, num_slices)))
    return [job_id.decode(errors="backslashreplace") for job_id in found]


def _find_stopped(pipeline: redis.Redis, queue: SvdqQueue, since_score: float | str = "-inf") -> None:
    names = (queue.failed_job_registry.key, keys.STOPPED)
    lua.run(pipeline, "find_stopped", names, Job.redis_job_namespace_prefix, since_score)


def _registries(queue: SvdqQueue) -> list[tuple[str, BaseRegistry]]:
    return [
        ("started", queue.started_job_registry),
        ("scheduled", queue.scheduled_job_registry),
        ("deferred", queue.deferred_job_registry),
        ("deferred", queue.ready_job_registry),  # about to be queued
        ("finished", queue.finished_job_registry),
        ("failed", queue.failed_job_registry),
        ("canceled", queue.canceled_job_registry),
    ]


#: Where Redis refuses writes, as it does when it is full or a replica, workers that run cannot renew their records.
WorkerState = Literal["running", "starting", "none", "unknown"]


class WorkerView(Record):
    """One worker group as registered in RQ."""

    name: str
    state: str = "?"  # RQ's: idle, busy, suspended, …
    #: Host and process id of its rank 0.
    hostname: str = "?"
    pid: int = 0
    #: Our queues that it takes jobs from.
    queues: Annotated[
        list[str], BeforeValidator(lambda names: [*filter(is_queue, names.split(","))]), Field(min_length=1)
    ]
    finished: int = Field(default=0, validation_alias="successful_job_count")  # number of jobs that it has ended
    failed: int = Field(default=0, validation_alias="failed_job_count")


def read_workers() -> Read[tuple[list[WorkerView], WorkerState]]:
    """Read the worker groups that take our jobs, by name, and say whether any does or is about to.

    Unreadable records are left out.
    """

    def put(pipeline: Pipeline) -> None:
        make_database_id(pipeline)
        pipeline.time()
        pipeline.zrange(keys.STARTING, -1, -1, withscores=True)
        pipeline.zrange(keys.RANKS, -1, -1, withscores=True)
        pipeline.smembers(Worker.redis_workers_keys)

    written, *answers = yield put
    (now, _), last, last_record, members = checked(answers)
    names = sorted(name.decode(errors="backslashreplace") for name in members)
    records = yield lambda pipeline: [pipeline.hgetall(name) for name in names]
    views = []
    for name, record in zip(names, records, strict=True):
        with contextlib.suppress(ValueError, AttributeError):
            fields = {key.decode(): value.decode() for key, value in record.items()}
            views.append(WorkerView(**fields | {"name": name.removeprefix(Worker.redis_worker_namespace_prefix)}))
    if views:
        return views, "running"
    if any(expires_at >= now for _, expires_at in last):
        return views, "starting"
    if any(written_at + keys.RANK_TTL_S > now for _, written_at in last_record):
        return views, "running"  # its ranks have ended until there is a job: its launcher writes their records
    is_refused = isinstance(written, redis.ResponseError) and not isinstance(written, NoPermissionError)
    return views, "unknown" if is_refused else "none"
