"""`--until`: whether another video can be done by then. Pure, no clock of its own."""

from collections.abc import Collection
from statistics import median


def is_too_late(now_s: float, until_s: float | None, latencies_s: Collection[float]) -> bool:
    """Whether a video that is begun now would not be done in time, going by how long the last ones took.

    Args:
        now_s: seconds since the epoch.
        until_s: the same; None means there is no end.
        latencies_s: from beginning to end of the last videos; as long as there are none, hope counts.
    """
    return until_s is not None and now_s + (median(latencies_s) if latencies_s else 0.0) >= until_s
