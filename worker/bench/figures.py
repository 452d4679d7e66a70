"""Computes the figures of a bench run from the logs of its ranks: rows of the table and the JSON. Without torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median, quantiles

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.trace import Span


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """The measurements of one rank; times in seconds since the epoch."""

    #: Each piece of work.
    spans: list[Span]
    #: When each video was finished, in order; on the last rank only.
    finished_s: list[float]
    #: Why videos failed; on rank 0 only.
    failures: list[str]
    #: CPU time in seconds, in the loop from the first video on.
    cpu_s: float
    #: Resident memory after each hundredth video and at the end, MiB.
    rss_mb: list[float]
    #: Peak GPU memory of its tensors, including weights, in MiB; None on a CPU.
    gpu_mb: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one run; field names are those of the JSON."""

    #: Model of the ranks.
    model: str
    #: Number of ranks K.
    ranks: int
    #: Denoising steps per video.
    steps: int
    #: Those of each of two experts, if ranks are bound to one of them each; else None.
    segments: tuple[int, int] | None
    #: Milliseconds of a step, configured (simulated) or measured (median).
    step_ms: float
    #: Milliseconds of an encode and of a decode, configured or measured.
    encode_ms: float
    decode_ms: float
    #: `loop` or `daemon`.
    through: str
    #: Number of videos.
    samples: int
    #: Videos left out of the steady figures at the start, and as many at the end.
    warmup_samples: int
    #: Seconds from taking the first video to its end.
    first_sample_s: float
    #: first_sample_s divided by W = T*t + E + D.
    first_sample_over_ideal: float
    #: Seconds per video in steady state: median over windows of K consecutive videos, over which the split rotates.
    per_sample_s: float
    #: The 95th percentile over the same windows.
    per_sample_p95_s: float
    #: Seconds in which the group does the work of one video, from the first videos to the last admission; `efficiency`
    #: is computed from it.
    per_sample_mean_s: float
    #: Median and 95th percentile of single intervals between finished videos.
    interval_s: float
    interval_p95_s: float
    #: W/K divided by `per_sample_mean_s`, where t is the harmonic mean of the ranks' step times. If ranks are bound, it
    #: is the ideal pace of those with the slower expert divided by `per_sample_mean_s`.
    efficiency: float
    #: Videos per second relative to one rank, which takes W per video.
    speedup: float
    #: Share of the steady part in which each rank computed.
    busy_share: list[float]
    #: Average number of steps per video of each rank.
    steps_per_rank: list[float]
    #: Resident memory of each rank at the end, and after its first hundred videos (empty for shorter runs), MiB.
    rss_mb: list[float]
    rss_after_100_mb: list[float]
    #: Peak GPU memory of each rank's tensors in MiB; empty on CPUs and through the daemon.
    gpu_mb: list[float]
    #: CPU milliseconds per video of each rank.
    cpu_ms: list[float]


def make_run(
    logs: Sequence[RankLog],
    *,
    model: str,
    through: str,
    steps: int,
    warmup_samples: int,
    costs: Costs | None,
    segments: tuple[int, int] | None = None,
) -> Run:
    """Compute the figures of a run.

    Args:
        logs: those of its ranks, in order.
        model: its name, for display.
        through: loop or daemon.
        steps: T.
        warmup_samples: number of finished videos to leave out at the start, while costs are measured, and at the end,
            when videos finish together; more than K must remain.
        costs: the configured costs of a video (simulated models); None measures them from the logs.
        segments: the steps of each expert, if each rank holds one of two.

    Raises:
        SvdqError: a video failed.
    """
    check_failures(logs)
    finished_s = sorted(time_s for log in logs for time_s in log.finished_s)
    ranks = len(logs)
    costs = costs or measured_costs(logs)
    steady_s = finished_s[warmup_samples : len(finished_s) - warmup_samples]
    intervals_s = [later - earlier for earlier, later in itertools.pairwise(steady_s)]
    paces_s = [(later - earlier) / ranks for earlier, later in zip(steady_s, steady_s[ranks:], strict=False)]
    video = VideoCosts(steps=steps, costs=costs, segments=segments)
    one_rank_s = video.video_s(ranks)
    pace_s = one_rank_s / work_rate(logs, costs, steady_s[0])
    first_sample_s = finished_s[0] - min(span.start_s for log in logs for span in log.spans if span.kind == "encode")
    return Run(
        model=model,
        ranks=ranks,
        steps=steps,
        segments=segments,
        step_ms=median(costs.step_s) * 1000,
        encode_ms=costs.encode_s * 1000,
        decode_ms=costs.decode_s * 1000,
        through=through,
        samples=len(finished_s),
        warmup_samples=warmup_samples,
        first_sample_s=first_sample_s,
        first_sample_over_ideal=first_sample_s / one_rank_s,
        per_sample_s=median(paces_s),
        per_sample_p95_s=_percentile_95(paces_s),
        per_sample_mean_s=pace_s,
        interval_s=median(intervals_s),
        interval_p95_s=_percentile_95(intervals_s),
        efficiency=(one_rank_s / ranks if segments is None else video.pace_s(ranks)) / pace_s,
        speedup=one_rank_s / pace_s,
        busy_share=[busy_share(log.spans, steady_s[0], steady_s[-1]) for log in logs],
        steps_per_rank=[sum(span.num_steps for span in log.spans) / len(finished_s) for log in logs],
        rss_mb=[log.rss_mb[-1] for log in logs],
        rss_after_100_mb=[log.rss_mb[0] for log in logs if len(log.rss_mb) > 1],
        gpu_mb=[log.gpu_mb for log in logs if log.gpu_mb is not None],
        cpu_ms=[log.cpu_s * 1000 / len(finished_s) for log in logs],
    )


def check_failures(logs: Sequence[RankLog]) -> None:
    """Raise an error if a video of the run failed.

    Raises:
        SvdqError: one did.
    """
    failures = [failure for log in logs for failure in log.failures]
    if failures:
        raise SvdqError(f"{len(failures)} of the videos failed; the first one: {failures[0]}")


def work_rate(logs: Sequence[RankLog], costs: Costs, start_s: float) -> float:
    """Return the seconds of work that a group does per second, from `start_s` until its last video is admitted.

    Videos cannot be counted for this: they finish late at the start of a run and together at its end. A step counts as
    in `VideoCosts.video_s`, an encode as E and a decode as D, whatever they took.
    """
    spans = [span for log in logs for span in log.spans]
    end_s = max((span.start_s for span in spans if span.kind == "encode"), default=start_s)
    if end_s <= start_s:  # all were admitted at once
        end_s = max(span.end_s for span in spans)
    step_s = harmonic_mean(costs.step_s)
    work_s = {"encode": costs.encode_s, "decode": costs.decode_s}
    done_s = 0.0
    for span in spans:
        seconds = span.num_steps * step_s or work_s.get(span.kind, 0.0)
        inside_s = max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
        done_s += seconds * inside_s / max(span.seconds, 1e-9)
    return done_s / (end_s - start_s)


def measured_costs(logs: Sequence[RankLog]) -> Costs:
    """Measure the costs of a video: medians of each rank's spans; a rank without steps counts as typical."""
    step_s = [[span.seconds / span.num_steps for span in log.spans if span.num_steps] for log in logs]
    typical_s = median(median(times) for times in step_s if times)

    def seconds_of(kind: str) -> float:
        return median([span.seconds for log in logs for span in log.spans if span.kind == kind] or [0.0])

    return Costs(
        step_s=tuple(median(times) if times else typical_s for times in step_s),
        encode_s=seconds_of("encode"),
        decode_s=seconds_of("decode"),
    )


def busy_share(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Return the share of start_s..end_s in which a rank computed; encodes may lie within spans of steps."""
    busy_s, covered_s = 0.0, start_s
    for span in sorted((span for span in spans if span.kind), key=lambda span: span.start_s):
        until_s = min(span.end_s, end_s)
        busy_s += max(0.0, until_s - max(span.start_s, covered_s))
        covered_s = max(covered_s, until_s)
    return busy_s / (end_s - start_s)


def _percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile; of a single value that value."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


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
