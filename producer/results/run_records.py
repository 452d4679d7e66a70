"""Collects what a run report is counted over: ended jobs from Redis, finished videos from the JSON beside them.

Redis knows why jobs failed, and forgets; a sidecar knows what its video cost, and stays. Knows no terminal.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import redis
from rq.registry import BaseRegistry

from svdq.producer import keys
from svdq.producer.queue import queues
from svdq.producer.results.results import Result, find_results
from svdq.producer.results.run_report import LEFT, Effort, End, RunRecord
from svdq.producer.status.status import view_many, view_queues
from svdq.producer.storage.storage import Storage

#: Jobs read in one round trip.
AT_ONCE = 500
#: Between a job's end and its entry in RQ's registry, at most; what is found there is looked at more closely.
SLACK = timedelta(minutes=1)
_ENDS: dict[str, End] = {"finished": "finished", "failed": "failed", "stopped": "stopped", "canceled": "canceled"}
#: Parts of a video's seconds that keep a rank busy; writing files goes on beside the next video.
_COMPUTE = ("encode", "denoise", "decode")


def records_from_redis(connection: redis.Redis, since: datetime, until: datetime) -> Iterator[RunRecord]:
    """Find the jobs of all queues that ended in a stretch of time; no others are read, however many there are."""
    for queue in queues(connection):
        # RQ sorts ended jobs by when they expire, and canceled ones by when they were canceled.
        yield from _ended_in(connection, queue.finished_job_registry, keys.RESULT_TTL_S, since, until)
        yield from _ended_in(connection, queue.failed_job_registry, keys.FAILURE_TTL_S, since, until)
        yield from _ended_in(connection, queue.canceled_job_registry, 0, since, until)


def records_from_storage(storage: Storage, since: datetime) -> Iterator[RunRecord]:
    """Find the videos that were finished since then, and what they cost.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    for result in find_results(storage, since=since):
        yield RunRecord(
            id=result.job_id,
            name=result.name,
            status="finished",
            ended_at=result.finished_at,
            effort=_effort_of(result),
        )


def jobs_left(connection: redis.Redis) -> dict[str, int]:
    """Count the jobs of all queues that are still to be done, by state."""
    total: Counter[str] = Counter()
    for queue in view_queues(connection):
        total.update({state: queue.counts.get(state, 0) for state in LEFT})
    return dict(total)


def _ended_in(
    connection: redis.Redis, registry: BaseRegistry, ttl_s: int, since: datetime, until: datetime
) -> Iterator[RunRecord]:
    """Find the jobs of a registry whose scores, less `ttl_s`, lie in a stretch of time."""
    first, last = since.timestamp() + ttl_s, (until + SLACK).timestamp() + ttl_s
    found: Any = connection.zrangebyscore(registry.key, first, last, withscores=True)
    scores = {job_id.decode(errors="backslashreplace"): score for job_id, score in found}
    job_ids = list(scores)
    for start in range(0, len(job_ids), AT_ONCE):
        for view in view_many(connection, job_ids[start : start + AT_ONCE]):
            at = datetime.fromtimestamp(scores[view.id] - ttl_s, UTC)
            if not view.is_readable:
                status: End = _ENDS.get(view.status, "failed")
                yield RunRecord(id=view.id, name="?", status=status, ended_at=at, error=view.error or "")
            elif view.status in _ENDS:  # else it is queued again
                # A job that was canceled in its queue has no end, or that of an earlier try.
                ended_at = view.ended_at if view.status != "canceled" else None
                yield RunRecord(
                    id=view.id,
                    name=view.name,
                    status=_ENDS[view.status],
                    ended_at=ended_at or at,
                    error=(view.error or "") if view.status == "failed" else "",
                )


def _effort_of(result: Result) -> Effort | None:
    """Read what a video cost; None where its sidecar does not say it, as those of earlier versions."""
    try:
        seconds, group = result.document["seconds"], result.document["group"]
        took_s = sum(float(value) for value in seconds.values())
        return Effort(
            group=f"{group['host']}:{group['pid']}",
            num_ranks=int(group["ranks"]),
            compute_s=sum(float(seconds.get(part, 0.0)) for part in _COMPUTE),
            begun_at=result.finished_at - timedelta(seconds=took_s),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
