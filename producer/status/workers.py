"""The worker groups that there are, as RQ knows them; `ranks` reads what they do. Reads only."""

from dataclasses import dataclass
from typing import Literal

import redis
import rq
from rq.serializers import JSONSerializer

from svdq.producer import keys
from svdq.producer.queue import SvdqQueue, queues


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker group, as RQ knows it."""

    #: Unique name.
    name: str
    #: RQ's words: idle, busy, suspended, …
    state: str
    #: Host and process of its rank 0.
    hostname: str
    pid: int
    #: Queues it takes jobs from.
    queues: list[str]
    #: Jobs it has ended.
    finished: int
    failed: int


def view_workers(connection: redis.Redis) -> list[WorkerView]:
    """Return the worker groups that take jobs of ours, by name."""
    names = {queue.name for queue in queues(connection)}
    workers = rq.Worker.all(connection=connection, queue_class=SvdqQueue, serializer=JSONSerializer)
    return [
        WorkerView(
            name=worker.name,
            state=str(getattr(worker.get_state(), "value", worker.get_state())),
            hostname=worker.hostname or "?",
            pid=worker.pid or 0,
            queues=worker.queue_names(),
            finished=worker.successful_job_count or 0,
            failed=worker.failed_job_count or 0,
        )
        for worker in sorted(workers, key=lambda worker: str(worker.name))
        if names & set(worker.queue_names())
    ]


def worker_state(connection: redis.Redis) -> Literal["running", "starting", "none"]:
    """Say whether any worker takes jobs of ours, or is about to."""
    if view_workers(connection):
        return "running"
    now, _ = connection.time()
    return "starting" if connection.zcount(keys.STARTING, now, "+inf") else "none"
