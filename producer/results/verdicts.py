"""What people have decided about finished videos: keep or reject. Verdicts outlive jobs, not files."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import redis

from svdq.producer import keys

Verdict = Literal["keep", "reject"]


def give(connection: redis.Redis, job_ids: Sequence[str], verdict: Verdict | None) -> None:
    """Record a verdict about videos; None takes back the one that was given."""
    if not job_ids:
        return
    if verdict is None:
        connection.hdel(keys.VERDICTS, *job_ids)
    else:
        connection.hset(keys.VERDICTS, mapping=dict.fromkeys(job_ids, verdict))


def read(connection: redis.Redis, job_ids: Sequence[str]) -> list[Verdict | None]:
    """Read the verdicts about videos, in their order; None where there is none."""
    if not job_ids:
        return []
    found: Any = connection.hmget(keys.VERDICTS, list(job_ids))
    return [_verdict(value) for value in found]


def kept(connection: redis.Redis) -> set[str]:
    """Return the ids of all jobs whose videos are to be kept."""
    return {
        job_id.decode(errors="backslashreplace")
        for job_id, value in connection.hscan_iter(keys.VERDICTS, count=1000)
        if _verdict(value) == "keep"
    }


def _verdict(value: bytes | None) -> Verdict | None:
    """Parse a value, which anyone with access to Redis may have written."""
    text = (value or b"").decode(errors="replace")
    return next((verdict for verdict in get_args(Verdict) if verdict == text), None)
