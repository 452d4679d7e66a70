"""Reads files of `svdq bench --json` and `--trace`: the costs of a video, and what each rank did."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, fair_time_s
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.occupancy import Cause, RankTime, handing_over, occupancy
from svdq.pipeline.trace import Span, num_steps

#: Ideal times this close count as equal: values in a JSON file went through divisions.
_EVEN_WITHIN = 0.01
#: Ranks whose step times differ by less count as equal: a mean over a run includes its settling shares.
_LIKE_THE_OTHERS = 0.1


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured group: the costs of its videos, its pace, and what each rank did."""

    #: Description of the source, for display.
    source: str
    #: The costs of a video, with a step time for each of the K ranks.
    video: VideoCosts
    #: Seconds between two finished videos; None with fewer than two.
    pace_s: float | None
    #: By rank.
    ranks: tuple[RankTime, ...]
    #: Number of videos of the run; None if it is still running or was a measurement.
    videos: int | None = None


def read_profile(path: Path) -> Profile:
    """Read a recording.

    Args:
        path: a file of `svdq bench --json`, `svdq bench --trace` or `svdq worker --trace`.

    Raises:
        InputError: the file is not a recording, or has too little data.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise InputError(
            f"{path} cannot be read ({reason}); give a file of svdq bench --json or of --trace."
        ) from error
    try:
        if isinstance(document, dict) and document.get("runs"):
            return _from_runs(document["runs"], str(path))
        if isinstance(document, dict) and "traceEvents" in document:
            return from_spans(_spans(document["traceEvents"]), str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is no recording of this version of svdq ({type(error).__name__}: {error}); record it again."
        ) from error
    raise InputError(f"{path} is no recording; give a file of svdq bench --json, svdq bench --trace or worker --trace.")


def from_spans(spans: Sequence[Sequence[Span]], source: str) -> Profile:
    """Build the profile of a run from the spans of its ranks.

    Raises:
        InputError: no video was finished in the run.
    """
    finished_s = sorted(span.end_s for span in spans[-1] if span.name == "decode") if spans else []
    if not finished_s:
        raise InputError(f"{source} has no video that was decoded in it; record a run of a few videos.")
    step_s = [
        [(span.end_s - span.start_s) / num_steps(span.name) for span in of if num_steps(span.name)] for of in spans
    ]
    known = [median(times) for times in step_s if times]
    if not known:
        raise InputError(f"{source} has no denoising step in it; record a run of a few videos.")
    steps: dict[str, int] = defaultdict(int)
    for span in (span for of in spans for span in of):
        steps[span.job_id] += num_steps(span.name)
    transfer_s, overhead_s = handing_over(spans)
    return Profile(
        source=source,
        video=VideoCosts(
            steps=round(median(count for count in steps.values() if count)),
            costs=Costs(
                step_s=tuple(median(times) if times else median(known) for times in step_s),
                encode_s=_median_of(spans, "encode"),
                decode_s=_median_of(spans, "decode"),
            ),
            transfer_s=transfer_s,
            overhead_s=overhead_s,
        ),
        pace_s=(finished_s[-1] - finished_s[0]) / (len(finished_s) - 1) if len(finished_s) > 1 else None,
        ranks=occupancy(spans),
        videos=len(finished_s),
    )


def _spans(events: Sequence[dict[str, Any]]) -> list[list[Span]]:
    """Extract the spans of each rank from trace events."""
    work = [event for event in events if event["ph"] == "X"]
    spans: list[list[Span]] = [[] for _ in range(max((event["pid"] for event in work), default=-1) + 1)]
    for event in work:
        start_s = event["ts"] / 1e6
        spans[event["pid"]].append(
            Span(
                name=event["name"],
                job_id=event["args"]["job"],
                start_s=start_s,
                end_s=start_s + event["dur"] / 1e6,
                thread=str(event["tid"]),
            )
        )
    return spans


def _from_runs(runs: Sequence[dict[str, Any]], source: str) -> Profile:
    """Use the largest group of a bench; the costs of hand-overs come from all its groups."""
    pipelines = [run for run in runs if run["through"] != "replicas"]
    if not pipelines:
        raise InputError(f"{source} has no run through a pipeline in it; run svdq bench with --json.")
    run = max(pipelines, key=lambda run: run["ranks"])
    pace_s: float = run["per_sample_mean_s"]
    costs = _costs_of(run)
    overheads_s = [one["per_sample_mean_s"] * (1 - one["efficiency"]) for one in pipelines if one["ranks"] > 1]
    return Profile(
        source=f"{source}, {run['ranks']} ranks",
        video=VideoCosts(steps=run["steps"], costs=costs, overhead_s=max(0.0, median(overheads_s or [0.0]))),
        pace_s=pace_s,
        # From the costs of a video on each rank. The busy share also includes that a finite run ends earlier for it.
        ranks=tuple(
            _rank_of_run(
                steps * step_s / pace_s,
                costs.encode_s / pace_s if rank == 0 else 0.0,
                costs.decode_s / pace_s if rank == run["ranks"] - 1 else 0.0,
            )
            for rank, (steps, step_s) in enumerate(zip(run["steps_per_rank"], costs.step_s, strict=True))
        ),
    )


def _rank_of_run(steps: float, encode: float, decode: float) -> RankTime:
    encode, decode = min(encode, 1.0), min(decode, 1.0)
    # The mean over a run that began with other shares may slightly exceed the available time.
    steps = max(0.0, min(steps, 1 - encode - decode))
    idle = max(0.0, 1 - steps - encode - decode)
    return RankTime(encode=encode, steps=steps, decode=decode, waits={Cause.UNKNOWN: idle})


def _costs_of(run: dict[str, Any]) -> Costs:
    """Return the costs of a run from its median step and, for unequal ranks, from their numbers of steps."""
    ranks = run["ranks"]
    even = Costs(
        step_s=(run["step_ms"] / 1000,) * ranks, encode_s=run["encode_ms"] / 1000, decode_s=run["decode_ms"] / 1000
    )
    fair_s = run["efficiency"] * run["per_sample_mean_s"]
    if abs(fair_time_s(run["steps"], even) / fair_s - 1) < _EVEN_WITHIN:
        return even
    # Fair shares make all ranks equally busy, so a rank with fewer steps is proportionally slower.
    step_s = [
        (fair_s - fixed_s) / steps if steps >= 1 and fair_s > fixed_s else run["step_ms"] / 1000
        for fixed_s, steps in zip(even.fixed_s, run["steps_per_rank"], strict=True)
    ]
    typical_s = run["step_ms"] / 1000
    return replace(
        even, step_s=tuple(typical_s if abs(one_s / typical_s - 1) < _LIKE_THE_OTHERS else one_s for one_s in step_s)
    )


def _median_of(spans: Sequence[Sequence[Span]], name: str) -> float:
    return median([span.end_s - span.start_s for of in spans for span in of if span.name == name] or [0.0])
