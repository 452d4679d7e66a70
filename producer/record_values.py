"""Checks the values of a job's record, which anyone with access to Redis may have written.

Touches RQ's internals; `tests/worker/test_group_worker.py` fails when a new RQ changes them.
"""

import zlib
from datetime import UTC, datetime
from typing import Any

import rq

from svdq.producer import keys

#: Times that RQ may have written; later arithmetic and time zones cannot handle the years at the ends of datetime.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2500, 1, 1, tzinfo=UTC)
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
#: Redis refuses to expire a key at a time that does not fit into 64 bits.
_MAX_TTL_S = 100 * 366 * keys.DAY_S


def drop_invalid_values(job: rq.job.Job) -> None:
    """Drop what has the wrong type or range and is not needed: it would fail later, when the job ends."""
    # What RQ's tools have written as pickle is not JSON, and must not keep the job from being written again.
    if not isinstance(job.meta, dict) or "unserialized" in job.meta:
        job.meta = {}
    for name in _TIMES:
        moment = getattr(job, name)
        if moment is not None and not _FIRST <= moment < _LAST:
            setattr(job, name, _FIRST if name == "created_at" else None)
    for name in ("ttl", "result_ttl", "failure_ttl"):
        ttl_s = getattr(job, name)
        if ttl_s is not None and not -1 <= ttl_s <= _MAX_TTL_S:
            setattr(job, name, None)
    if not _are_seconds(job.retry_intervals):
        job.retry_intervals = None
    if not _are_seconds(job.repeat_intervals):
        job.repeat_intervals = job.repeats_left = None
    if not isinstance(job._dependency_ids, list) or not all(isinstance(name, str) for name in job._dependency_ids):
        job._dependency_ids = []


def check_size(field: bytes, max_bytes: int) -> None:
    """Raise ValueError when a compressed field holds too much; one that is not compressed is as large as it is."""
    try:
        start = zlib.decompressobj().decompress(field, max_bytes + 1)
    except zlib.error:
        return
    if len(start) > max_bytes:
        raise ValueError(f"a compressed field holds more than {max_bytes} bytes")


def _are_seconds(intervals: Any) -> bool:
    """Whether these are intervals that RQ can add to a time."""
    return intervals is None or (
        isinstance(intervals, list)
        and all(type(seconds) is int and 0 <= seconds <= keys.FAILURE_TTL_S for seconds in intervals)
    )
