"""Reads the worker groups that are registered in RQ, and the models of workers; `ranks` has their activity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis
from rq.worker import Worker

from svdq.pipeline.models.family_parameters import PARAMETERS
from svdq.producer import keys
from svdq.producer.status.ranks import read_groups

WorkerState = Literal["running", "starting", "none"]


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker group as registered in RQ."""

    #: Unique name.
    name: str
    #: RQ's state: idle, busy, suspended, …
    state: str
    #: Host and process id of its rank 0.
    hostname: str
    pid: int
    #: Queues it takes jobs from.
    queues: list[str]
    #: Number of jobs that it has ended.
    finished: int
    failed: int


def view_workers(connection: redis.Redis) -> list[WorkerView]:
    """Return the worker groups that take our jobs, by name; two round trips. Unreadable records are left out."""
    members: Any = connection.smembers(Worker.redis_workers_keys)
    names = sorted(name.decode(errors="backslashreplace") for name in members)
    with connection.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(name)
        records = pipeline.execute(raise_on_error=False)
    views = []
    for name, record in zip(names, records, strict=True):
        if not isinstance(record, dict):
            continue
        fields = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in record.items()}
        queues = [queue for queue in fields.get("queues", "").split(",") if queue in keys.QUEUE_NAMES]
        if queues:
            views.append(
                WorkerView(
                    name=name.removeprefix(Worker.redis_worker_namespace_prefix),
                    state=fields.get("state", "?"),
                    hostname=fields.get("hostname", "?"),
                    pid=_number(fields.get("pid")),
                    queues=queues,
                    finished=_number(fields.get("successful_job_count")),
                    failed=_number(fields.get("failed_job_count")),
                )
            )
    return views


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 19 else 0


def running_models(connection: redis.Redis) -> dict[str, str | None]:
    """Return the models that workers run or load, by name, with their families; None where that is any or unknown."""
    # Imported here so that `svdq status` stays fast.
    from svdq.pipeline.models.registry import family_of_model

    found = {
        rank.model: rank.family or family_of_model(rank.model)
        for group in read_groups(connection)
        for rank in group.ranks
    }
    now, _ = connection.time()
    starting: Any = connection.zrange(keys.STARTING, now, "+inf", byscore=True)
    for member in starting:
        _, _, described = member.decode(errors="backslashreplace").partition(" ")
        family, _, name = described.partition(" ")
        if name:
            found.setdefault(name, family if family in PARAMETERS else None)
    return found


def worker_state(connection: redis.Redis, workers: Sequence[WorkerView] | None = None) -> WorkerState:
    """Say whether any worker takes jobs of ours, or is about to."""
    if view_workers(connection) if workers is None else workers:
        return "running"
    now, _ = connection.time()
    return "starting" if connection.zcount(keys.STARTING, now, "+inf") else "none"
