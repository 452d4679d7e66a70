"""Collects the records of a run report: ended jobs from Redis, finished videos from the sidecars beside them.

Redis has the reasons of failures but expires; a sidecar has the costs of its video and is kept.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, get_args

import redis
from rq.registry import BaseRegistry, FailedJobRegistry, FinishedJobRegistry

from svdq.producer import keys
from svdq.producer.queue import queues
from svdq.producer.results.results import Result, find_results
from svdq.producer.results.run_report import LEFT, End, RenderCost, RunRecord
from svdq.producer.status.registries import counts
from svdq.producer.status.status import view_many
from svdq.producer.storage.storage import Storage
from svdq.producer.untrusted_job import AT_ONCE

#: Seconds by which the clocks of Redis and of workers may differ.
SLACK_S = 24 * 60 * 60
#: Phases that keep a rank busy; files are written in parallel with the next video.
_COMPUTE = ("encode", "denoise", "decode")
#: Largest values accepted from a sidecar: a year, and more ranks than any group has.
MAX_SECONDS, MAX_RANKS = 366 * 24 * 60 * 60.0, 10_000


def records_from_redis(
    connection: redis.Redis, since: datetime, until: datetime, on_bad: Callable[[str], None] = lambda reason: None
) -> Iterator[RunRecord]:
    """Find the jobs of all queues that ended in a period.

    `on_bad` is called with a sentence for each job that cannot be read, which is left out.
    """
    for queue in queues(connection):
        for registry in (queue.finished_job_registry, queue.failed_job_registry, queue.canceled_job_registry):
            yield from _ended_in(connection, registry, since, until, on_bad)


def records_from_storage(
    storage: Storage, since: datetime, on_bad: Callable[[str], None] = lambda reason: None
) -> Iterator[RunRecord]:
    """Find the videos that were finished since a time, with their costs.

    `on_bad` is called with a sentence for each JSON file that is not a sidecar, which is left out.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    for result in find_results(storage, since=since, on_bad=on_bad):
        yield RunRecord(
            id=result.job_id,
            name=result.name,
            status="finished",
            ended_at=result.finished_at,
            cost=_cost_of(result),
        )


def jobs_left(connection: redis.Redis) -> dict[str, int]:
    """Count the unfinished jobs of all queues by state."""
    total: Counter[str] = Counter()
    for by_status in counts(connection).values():
        total.update({status: by_status[status] for status in LEFT})
    return dict(total)


def _ended_in(
    connection: redis.Redis, registry: BaseRegistry, since: datetime, until: datetime, on_bad: Callable[[str], None]
) -> Iterator[RunRecord]:
    """Find the jobs of a registry that ended in a period.

    RQ sorts ended jobs by expiry. svdq keeps all of a status equally long, so those that expire too early are not read.
    """
    kept_s = {FinishedJobRegistry: keys.RESULT_TTL_S, FailedJobRegistry: keys.FAILURE_TTL_S}.get(type(registry), 0)
    least = since.timestamp() + kept_s - SLACK_S
    found: Any = connection.zrangebyscore(registry.key, least, "+inf")
    ids = [job_id.decode(errors="backslashreplace") for job_id in found]
    for start in range(0, len(ids), AT_ONCE):
        for view in view_many(connection, ids[start : start + AT_ONCE]):
            if not view.is_readable:
                on_bad(f"{view.error} It is left out.")
                continue
            # It may be queued again.
            status = next((end for end in get_args(End) if end == view.status), None)
            if status is not None and view.ended_at is not None and since <= view.ended_at <= until:
                error = view.error if status == "failed" else None
                yield RunRecord(id=view.id, name=view.name, status=status, ended_at=view.ended_at, error=error or "")


def _cost_of(result: Result) -> RenderCost | None:
    """Read the costs of a video; None if its sidecar lacks them, as in earlier versions."""
    try:
        seconds, group = result.document["seconds"], result.document["group"]
        took_s = sum(float(value) for value in seconds.values())
        compute_s = sum(float(seconds.get(part, 0.0)) for part in _COMPUTE)
        num_ranks = int(group["ranks"])
        if not (0 <= compute_s <= took_s < MAX_SECONDS and 1 <= num_ranks <= MAX_RANKS):
            return None
        return RenderCost(
            group=f"{group['host']}:{group['pid']}",
            num_ranks=num_ranks,
            compute_s=compute_s,
            begun_at=result.finished_at - timedelta(seconds=took_s),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
