"""Where in RQ the jobs of each state stand, looked at without reading jobs: counts, and the newest ids.

One round trip each, whose length is that of what is asked for, however many jobs are kept. Reads only: RQ's clean-up is
never run here, for it may call functions that whoever writes to Redis has chosen.
"""

from collections.abc import Callable, Mapping, Sequence

import redis
from rq.intermediate_queue import IntermediateQueue
from rq.registry import BaseRegistry
from rq.utils import as_text

from svdq.producer.queue import SvdqQueue, queues


def counts(connection: redis.Redis) -> dict[str, dict[str, int]]:
    """Count the jobs of every queue by RQ's words for their state."""
    asked = []
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.llen(queue.key)
            pipeline.llen(_between(queue))
            asked += [(queue.name, "queued"), (queue.name, "queued")]
            for status, registry in _registries(queue).items():
                pipeline.zcard(registry.key)
                asked.append((queue.name, status))
        answers = pipeline.execute()
    found: dict[str, dict[str, int]] = {}
    for (name, status), number in zip(asked, answers, strict=True):
        of_queue = found.setdefault(name, {})
        of_queue[status] = of_queue.get(status, 0) + number
    return found


def newest_ids(connection: redis.Redis, limit: int, statuses: Sequence[str] = ()) -> list[str]:
    """Return the ids of the newest jobs of every state and queue, at most `limit` of each, each once, in no order.

    Registries are sorted by expiry, which for ended jobs follows their end.

    Args:
        connection: to Redis.
        limit: number of ids of one queue in one state.
        statuses: only these; all when there are none.
    """
    ids: dict[str, None] = {}
    readers: list[Callable[[str], str]] = []
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            if not statuses or "queued" in statuses:
                pipeline.lrange(queue.key, -limit, -1)
                pipeline.lrange(_between(queue), -limit, -1)
                readers += [as_text, as_text]
            for status, registry in _registries(queue).items():
                if not statuses or status in statuses:
                    pipeline.zrange(registry.key, 0, limit - 1, desc=True)
                    readers.append(registry.parse_job_id)  # an entry may be more than the id
        answers = pipeline.execute()
    for read, entries in zip(readers, answers, strict=True):
        ids.update(dict.fromkeys(map(read, entries)))
    return list(ids)


def num_ahead(connection: redis.Redis, places: Mapping[str, str]) -> dict[str, int]:
    """Count the jobs that are taken before others that wait.

    Args:
        connection: to Redis.
        places: the name of the queue by the id of each job that waits.

    Returns:
        The number by job id; without those that do not wait any more.
    """
    names = [queue.name for queue in queues(connection)]
    lists = [queue.key for queue in queues(connection)]
    with connection.pipeline(transaction=False) as pipeline:
        for key in lists:
            pipeline.llen(key)
        for job_id, name in places.items():
            pipeline.lpos(lists[names.index(name)], job_id)
        answers = pipeline.execute()
    lengths, positions = answers[: len(lists)], answers[len(lists) :]
    return {
        job_id: sum(lengths[: names.index(name)]) + position
        for (job_id, name), position in zip(places.items(), positions, strict=True)
        if position is not None
    }


def _between(queue: SvdqQueue) -> str:
    """Where RQ keeps a job between taking it off the queue and registering it as started."""
    return IntermediateQueue.get_intermediate_queue_key(queue.key)


def _registries(queue: SvdqQueue) -> dict[str, BaseRegistry]:
    return {
        "started": queue.started_job_registry,
        "scheduled": queue.scheduled_job_registry,
        "deferred": queue.deferred_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
        "canceled": queue.canceled_job_registry,
    }
