"""Computes the figures of bursts: how long N videos take that an idle group gets at once. Without torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from svdq.pipeline.bench.report import RankLog, check_failures, measured_costs
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Burst:
    """N videos that an idle group gets at once, and the same through replicas; field names are those of the JSON."""

    #: Number of ranks K.
    ranks: int
    #: `loop` or `daemon`.
    through: str
    #: N.
    videos: int
    #: Whether it is the first burst of a fresh group, which has measured no costs yet.
    is_first: bool
    #: Seconds from the start of the first encode to the end of the last video.
    wall_s: float
    #: The lower bound of any schedule, max(W, N*W/K), or of any on ranks that hold one of two experts each.
    bound_s: float
    #: wall_s / bound_s.
    ratio: float
    #: The same for K groups of one rank that share the videos.
    replicas_wall_s: float
    replicas_ratio: float
    #: wall_s / replicas_wall_s.
    pipeline_over_replicas: float


def make_bursts(
    logs: Sequence[RankLog],
    replicas: Sequence[RankLog],
    *,
    through: str,
    steps: int,
    videos: Sequence[int],
    costs: Costs | None,
    segments: tuple[int, int] | None = None,
) -> list[Burst]:
    """Compute the figures of bursts of so many videos each, from the logs of a pipeline and of as many replicas.

    The other arguments are those of `make_run`.

    Raises:
        SvdqError: a video failed.
    """
    check_failures([*logs, *replicas])
    ranks = len(logs)
    video = VideoCosts(steps=steps, costs=costs or measured_costs(logs), segments=segments)
    one_rank_s = video.video_s(ranks)
    bursts = []
    for position, (number, (start_s, end_s), (replicas_start_s, replicas_end_s)) in enumerate(
        zip(videos, burst_times(logs, videos), burst_times(replicas, videos), strict=True)
    ):
        wall_s, replicas_s = end_s - start_s, replicas_end_s - replicas_start_s
        bound_s = max(one_rank_s, number * one_rank_s / ranks) if segments is None else video.time_s(ranks, number)
        bursts.append(
            Burst(
                ranks=ranks,
                through=through,
                videos=number,
                is_first=position == 0,
                wall_s=wall_s,
                bound_s=bound_s,
                ratio=wall_s / bound_s,
                replicas_wall_s=replicas_s,
                replicas_ratio=replicas_s / bound_s,
                pipeline_over_replicas=wall_s / replicas_s,
            )
        )
    return bursts


def burst_times(logs: Sequence[RankLog], videos: Sequence[int]) -> list[tuple[float, float]]:
    """Return the start of the first encode and the end of the last video of each burst; bursts do not overlap."""
    starts_s = sorted(span.start_s for log in logs for span in log.spans if span.kind == "encode")
    finished_s = sorted(time_s for log in logs for time_s in log.finished_s)
    ends = list(itertools.accumulate(videos))
    return [(starts_s[end - number], finished_s[end - 1]) for end, number in zip(ends, videos, strict=True)]
