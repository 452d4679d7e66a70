"""Computes the figures of `svdq bench` from the times at which videos were finished. Pure code."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The time between finished videos in steady state, in seconds.

    A fractional split of steps rotates over K videos, so single intervals differ by a step by design. What matters to a
    user is the pace: the mean over K consecutive videos.
    """

    #: Duration of the steady part divided by its number of videos; throughput and efficiency are computed from it.
    mean_s: float
    #: Median and 95th percentile of the pace over K consecutive videos.
    pace_s: float
    pace_p95_s: float
    #: Median and 95th percentile of single intervals.
    interval_s: float
    interval_p95_s: float


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile; of a single value that value."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


def steady_state(finished_s: Sequence[float], *, num_ranks: int, num_warmup: int) -> Steady:
    """Measure the steady part, which follows the first `num_warmup` finished videos.

    Args:
        finished_s: when each video was finished, ascending.
        num_ranks: K.
        num_warmup: videos that fill the pipeline and let the shares settle; at least two videos must remain.
    """
    steady = finished_s[num_warmup:]
    intervals = [later - earlier for earlier, later in itertools.pairwise(steady)]
    span = min(num_ranks, len(intervals))
    paces = [(steady[n + span] - steady[n]) / span for n in range(len(steady) - span)]
    return Steady(
        mean_s=(steady[-1] - steady[0]) / len(intervals),
        pace_s=median(paces),
        pace_p95_s=percentile_95(paces),
        interval_s=median(intervals),
        interval_p95_s=percentile_95(intervals),
    )


def replicas_state(finished_s: Sequence[Sequence[float]]) -> Steady:
    """Measure replicas, which render whole videos: their common pace is that of one divided by their number."""
    intervals = [later - earlier for times in finished_s for earlier, later in itertools.pairwise(times)]
    paces = [interval / len(finished_s) for interval in intervals]
    return Steady(
        mean_s=sum(paces) / len(paces),
        pace_s=median(paces),
        pace_p95_s=percentile_95(paces),
        interval_s=median(intervals),
        interval_p95_s=percentile_95(intervals),
    )


def busy_share(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the share of start_s..end_s covered by the spans (start, end), which do not overlap."""
    busy_s = sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in spans)
    return busy_s / (end_s - start_s)


def batch_time_s(num_videos: int, first_s: float, per_sample_s: float) -> float:
    """Return the duration of a run of `num_videos`: the first video's latency, then the steady pace."""
    return first_s + (num_videos - 1) * per_sample_s


def break_even(first_s: float, per_sample_s: float, other_first_s: float, other_per_sample_s: float) -> float | None:
    """Return the number of videos from which the first way is faster than the other; None if it never is.

    Solves first_s + (n - 1) per_sample_s = other_first_s + (n - 1) other_per_sample_s for n.
    """
    gained_s = other_per_sample_s - per_sample_s
    if gained_s <= 0:
        return None if first_s >= other_first_s else 1.0
    return max(1.0, 1 + (first_s - other_first_s) / gained_s)
