"""What Redis says at one moment of queues and ranks, in some ten round trips, however many jobs are kept.

Knows no Prometheus and no launcher.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import redis
from rq.job import Job
from rq.utils import as_text, utcparse

from svdq.producer.queue import queues
from svdq.producer.status.ranks import RankStatus
from svdq.producer.status.snapshot import take

#: Jobs at the front of a queue that are looked at for their age: some may have been moved there, past older ones.
FRONT = 10


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What was found."""

    #: Seconds since the epoch.
    at: float
    #: Number of jobs by the name of the queue and RQ's word for their state.
    counts: Mapping[str, Mapping[str, int]]
    #: Seconds for which the oldest job at the front of each queue has waited; 0 when it is empty.
    oldest_s: Mapping[str, float]
    #: Seconds until all will be done; None while that cannot be told.
    eta_s: float | None
    #: Reasons for which no jobs are taken.
    num_pauses: int
    #: Every rank of every group, on whatever host.
    ranks: tuple[RankStatus, ...]


def read(connection: redis.Redis) -> Readings:
    """Look at everything.

    Raises:
        redis.RedisError: the server does not answer, or refuses to.
    """
    found = take(connection)
    return Readings(
        at=found.at,
        counts={queue.name: queue.counts for queue in found.queues},
        oldest_s=_oldest_s(connection, found.at),
        eta_s=found.estimate.eta_s,
        num_pauses=len(found.pauses),
        ranks=tuple(rank for group in found.groups for rank in group.ranks),
    )


def _oldest_s(connection: redis.Redis, now: float) -> dict[str, float]:
    ours = queues(connection)
    with connection.pipeline(transaction=False) as pipeline:
        for queue in ours:
            pipeline.lrange(queue.key, 0, FRONT - 1)
        fronts = pipeline.execute()
        for job_id in [job_id for front in fronts for job_id in front]:
            pipeline.hget(Job.key_for(as_text(job_id)), "enqueued_at")
        # What is no job is an error in its place, and keeps no other from being looked at.
        moments = iter(pipeline.execute(raise_on_error=False))
    found = {}
    for queue, front in zip(ours, fronts, strict=True):
        ages_s = [_age_s(next(moments), now) for _ in front]
        found[queue.name] = max(ages_s, default=0.0)
    return found


def _age_s(moment: object, now: float) -> float:
    try:
        return max(0.0, now - utcparse(moment.decode()).timestamp()) if isinstance(moment, bytes) else 0.0
    except ValueError:  # anyone can write to Redis
        return 0.0
