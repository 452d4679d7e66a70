"""What a person says of finished videos: to keep or to reject them. A verdict outlives its job."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import redis

from svdq.producer import keys

Verdict = Literal["keep", "reject"]


def record_verdict(connection: redis.Redis, job_ids: Sequence[str], verdict: Verdict | None) -> None:
    """Record a verdict about videos; None takes back the one that was given."""
    if not job_ids:
        return
    with connection.pipeline() as pipeline:
        if verdict is None:
            pipeline.hdel(keys.VERDICTS, *job_ids)
        else:
            pipeline.hset(keys.VERDICTS, mapping=dict.fromkeys(job_ids, verdict))
        pipeline.incr(keys.VERDICT_CHANGES)
        pipeline.execute()


def read_verdicts(connection: redis.Redis, job_ids: Sequence[str]) -> list[Verdict | None]:
    """Read the verdicts about videos, in their order; None where there is none."""
    if not job_ids:
        return []
    found: Any = connection.hmget(keys.VERDICTS, list(job_ids))
    return [next((verdict for verdict in get_args(Verdict) if verdict.encode() == value), None) for value in found]


def ids_with_verdict(connection: redis.Redis, verdict: Verdict) -> set[str]:
    """Return the ids of all jobs whose videos have this verdict."""
    return {
        job_id.decode(errors="backslashreplace")
        for job_id, value in connection.hscan_iter(keys.VERDICTS, count=1000)
        if value == verdict.encode()
    }
