"""Computes the figures of a bench from the logs of its ranks. Does not import torch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median, quantiles

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.trace import Span, steps_by_job

MAX_EFFICIENCY = 1.01  # more than that is a wrong measurement
MAX_DIFFERENCE = 0.03  # between the pace by work and that by the clock, as a share


@dataclass(frozen=True, kw_only=True)
class RankMeasurements:
    """The measurements of one rank; times in seconds since the epoch."""

    spans: list[Span]
    finished_s: list[float]  # when each video was finished, in order; on the last rank only
    failures: list[str]  # why videos failed; on rank 0 only
    rss_mb: float  # resident memory at the end, MiB
    gpu_mb: float | None = None  # peak GPU memory of its tensors, including weights, in MiB; None on a CPU


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of a run; fields have the names of the JSON. Lists have an item for each rank."""

    #: K, T, and the milliseconds of a step, an encode and a decode: configured (simulated), or medians.
    ranks: int
    steps: int
    step_ms: float
    encode_ms: float
    decode_ms: float
    samples: int
    first_sample_s: float  # seconds from taking the first video to its end
    #: Seconds per video in steady state: median and 95th percentile over windows of K consecutive videos, over which
    #: the split rotates.
    per_sample_s: float
    per_sample_p95_s: float
    per_sample_mean_s: float  # seconds in which the group does the work of one video
    per_sample_clock_s: float  # mean seconds between the ends of two videos in steady state
    #: The ideal pace divided by `per_sample_mean_s`: W/K, where t is the harmonic mean of the ranks' step times; if
    #: ranks are bound, the pace of those with the slower expert.
    efficiency: float
    busy_share: list[float]  # share of the steady part in which each rank computed
    steps_per_rank: list[float]  # average number of steps per video
    rss_mb: list[float]  # resident memory at the end, MiB
    gpu_mb: list[float]  # peak GPU memory of tensors in MiB; empty on CPUs and through the daemon

    @property
    def doubt(self) -> str:
        """A sentence where the pace by work and that by the clock do not agree, else ""."""
        by_work, by_clock = self.per_sample_mean_s, self.per_sample_clock_s
        if abs(by_work / by_clock - 1) <= MAX_DIFFERENCE:
            return ""
        difference = by_clock / by_work - 1
        return f"A video took {by_clock:.4g} s by the clock, and {by_work:.4g} s by the work done: {difference:+.1%}."


def make_run(logs: Sequence[RankMeasurements], video: VideoCosts, warmup_samples: int) -> Run:
    """Compute the figures of a run from the logs of its ranks, in order.

    `warmup_samples` finished videos are left out at the start, while costs are measured, and as many at the end, when
    videos finish together; more than K must remain.
    """
    _check_steps(logs, video.steps)
    finished_s = sorted(time_s for log in logs for time_s in log.finished_s)
    ranks, costs = len(logs), video.costs
    steady_s = finished_s[warmup_samples : len(finished_s) - warmup_samples]
    paces_s = [(later - earlier) / ranks for earlier, later in zip(steady_s, steady_s[ranks:], strict=False)]
    one_rank_s = video.video_s(ranks)
    pace_s = one_rank_s / work_rate(logs, costs, *steady_part(logs, warmup_samples), step_costs=video.step_costs)
    began_s = min(span.start_s for log in logs for span in log.spans if span.kind == "encode")
    efficiency = (one_rank_s / ranks if video.segments is None else video.pace_s(ranks)) / pace_s
    # Ranks of the faster expert work ahead for a while, by as many videos as are in flight.
    most = MAX_EFFICIENCY + (ranks / len(steady_s) if video.segments is not None else 0.0)
    _check_efficiency(efficiency, most, logs, video)
    return Run(
        ranks=ranks,
        steps=video.steps,
        step_ms=median(costs.step_s) * 1000,
        encode_ms=costs.encode_s * 1000,
        decode_ms=costs.decode_s * 1000,
        samples=len(finished_s),
        first_sample_s=finished_s[0] - began_s,
        per_sample_s=median(paces_s),
        per_sample_p95_s=_percentile_95(paces_s),
        per_sample_mean_s=pace_s,
        per_sample_clock_s=(steady_s[-1] - steady_s[0]) / (len(steady_s) - 1),
        efficiency=efficiency,
        busy_share=[busy_share(log.spans, steady_s[0], steady_s[-1]) for log in logs],
        steps_per_rank=[sum(span.num_steps for span in log.spans) / len(finished_s) for log in logs],
        rss_mb=[log.rss_mb for log in logs],
        gpu_mb=[log.gpu_mb for log in logs if log.gpu_mb is not None],
    )


def _check_steps(logs: Sequence[RankMeasurements], steps: int) -> None:
    """Raise an SvdqError unless the spans of each video count all of its steps once."""
    counted = steps_by_job(span for log in logs for span in log.spans)
    if wrong := next((f"{number} steps of {job}" for job, number in counted.items() if number != steps), ""):
        raise SvdqError(f"The trace has {wrong} in place of {steps}, so no figures follow from it; report this.")


def _check_efficiency(efficiency: float, most: float, logs: Sequence[RankMeasurements], video: VideoCosts) -> None:
    """Raise an SvdqError for an efficiency that no group can have, with the cause."""
    if efficiency <= most:
        return
    spans = [span for log in logs for span in log.spans if span.num_steps]
    mean_ms = 1000 * sum(span.seconds for span in spans) / sum(_work(span, video.step_costs) for span in spans)
    counted_ms = 1000 * harmonic_mean(video.costs.step_s)
    raise SvdqError(
        f"The efficiency came out as {efficiency:.3f}, which is more than there can be: a step took {mean_ms:.4g} ms "
        f"on average, and counts {counted_ms:.4g} ms; measure again with nothing beside it."
    )


def check_failures(logs: Sequence[RankMeasurements]) -> None:
    """Raise an SvdqError if a video of the run failed."""
    failures = [failure for log in logs for failure in log.failures]
    if failures:
        raise SvdqError(f"{len(failures)} of the videos failed; the first one: {failures[0]}")


def work_rate(
    logs: Sequence[RankMeasurements], costs: Costs, start_s: float, end_s: float, *, step_costs: Sequence[float] = ()
) -> float:
    """Return the seconds of work that a group does per second from `start_s` to `end_s`.

    Work counts as in `VideoCosts.video_s`, however long it took.
    """
    step_s = harmonic_mean(costs.step_s)
    work_s = {"encode": costs.encode_s, "decode": costs.decode_s}
    done_s = 0.0
    for span in (span for log in logs for span in log.spans):
        steps_s = _work(span, step_costs) * step_s
        done_s += (steps_s or work_s.get(span.kind, 0.0)) * _share_within(span, start_s, end_s)
    return done_s / (end_s - start_s)


def steady_part(logs: Sequence[RankMeasurements], warmup_samples: int) -> tuple[float, float]:
    """Return from when to when work counts: from the end of the warm-up until the last video is admitted.

    Videos cannot be counted: they finish late at the start of a run and together at its end.
    """
    start_s = sorted(time_s for log in logs for time_s in log.finished_s)[warmup_samples]
    spans = [span for log in logs for span in log.spans]
    end_s = max((span.start_s for span in spans if span.kind == "encode"), default=start_s)
    if end_s <= start_s:  # all were admitted at once
        end_s = max(span.end_s for span in spans)
    return start_s, end_s


def _work(span: Span, step_costs: Sequence[float]) -> float:
    """Return the work of a span's steps, in steps of cost 1."""
    return sum(step_costs[step] for step in span.steps) if step_costs else len(span.steps)


def measured_costs(
    logs: Sequence[RankMeasurements],
    start_s: float = 0.0,
    end_s: float = math.inf,
    *,
    step_costs: Sequence[float] = (),
) -> Costs:
    """Measure the costs of a video from `start_s` to `end_s`; a rank without steps counts as typical.

    `step_costs` are relative, as of `VideoCosts`.

    A step, an encode or a decode costs the median or the mean of its spans, whichever is less: no rank then does more
    work in that time than there can be, however the times scatter.
    """

    def typical(spans: Sequence[Span]) -> float | None:
        within = [(span, _share_within(span, start_s, end_s)) for span in spans]
        parts = [part for part in within if part[1]] or [(span, 1.0) for span in spans]
        if not parts:
            return None
        mean_s = sum(share * span.seconds for span, share in parts) / sum(
            share * (_work(span, step_costs) or 1) for span, share in parts
        )
        return min(median(span.seconds / (_work(span, step_costs) or 1) for span, _ in parts), mean_s)

    step_s = [typical([span for span in log.spans if span.num_steps]) for log in logs]
    typical_s = median(cost_s for cost_s in step_s if cost_s is not None)

    def seconds_of(kind: str) -> float:
        return typical([span for log in logs for span in log.spans if span.kind == kind]) or 0.0

    return Costs(
        step_s=tuple(typical_s if cost_s is None else cost_s for cost_s in step_s),
        encode_s=seconds_of("encode"),
        decode_s=seconds_of("decode"),
    )


def _share_within(span: Span, start_s: float, end_s: float) -> float:
    """Return the share of a span that lies within a period."""
    inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
    return max(0.0, inside_s) / max(span.seconds, 1e-9)


def busy_share(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """Return the share of start_s..end_s in which a rank computed; encodes may lie within spans of steps."""
    busy_s, covered_s = 0.0, start_s
    for span in sorted((span for span in spans if span.kind), key=lambda span: span.start_s):
        until_s = min(span.end_s, end_s)
        busy_s += max(0.0, until_s - max(span.start_s, covered_s))
        covered_s = max(covered_s, until_s)
    return busy_s / (end_s - start_s)


def _percentile_95(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]


@dataclass(frozen=True, kw_only=True)
class Burst:
    """The figures of N videos that an idle group gets at once; fields have the names of the JSON."""

    videos: int
    is_first: bool  # whether it is the first burst of a fresh group, which has measured no costs yet
    wall_s: float  # seconds from the start of the first encode to the end of the last video
    bound_s: float  # max(W, N*W/K), or the bound of ranks with one of two experts each
    ratio: float  # wall_s / bound_s
    #: The shortest possible time of K replicas, groups of one rank that share the videos, and wall_s divided by it.
    replicas_s: float
    pipeline_over_replicas: float


def make_bursts(logs: Sequence[RankMeasurements], video: VideoCosts, videos: Sequence[int]) -> list[Burst]:
    """Compute the figures of bursts of so many videos each."""
    ranks = len(logs)
    one_rank_s = video.video_s(ranks)
    bursts: list[Burst] = []
    for number, (start_s, end_s) in zip(videos, burst_times(logs, videos), strict=True):
        wall_s, replicas_s = end_s - start_s, video.replicas_time_s(ranks, number)
        bound_s = max(one_rank_s, number * one_rank_s / ranks)
        if video.segments is not None:
            bound_s = video.time_s(ranks, number)
        bursts.append(
            Burst(
                videos=number,
                is_first=not bursts,
                wall_s=wall_s,
                bound_s=bound_s,
                ratio=wall_s / bound_s,
                replicas_s=replicas_s,
                pipeline_over_replicas=wall_s / replicas_s,
            )
        )
    return bursts


def burst_times(logs: Sequence[RankMeasurements], videos: Sequence[int]) -> list[tuple[float, float]]:
    """Return start of the first encode, or of loading it, and end of the last video of each burst."""
    starts_s = sorted(span.start_s for log in logs for span in log.spans if span.kind == "encode")
    loads_s = sorted(span.start_s for log in logs for span in log.spans if span.name.startswith("load "))
    finished_s = sorted(time_s for log in logs for time_s in log.finished_s)
    times, before_s = [], 0.0
    for number, end in zip(videos, itertools.accumulate(videos), strict=True):
        encode_s = starts_s[end - number]
        start_s = next((load_s for load_s in loads_s if before_s < load_s < encode_s), encode_s)
        before_s = finished_s[end - 1]
        times.append((start_s, before_s))
    return times
