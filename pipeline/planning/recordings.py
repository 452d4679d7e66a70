"""Reads files of `svdq bench --json` and `--trace`: the costs of a video, and what each rank did."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, fair_time_s
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.occupancy import Cause, RankTime, handing_over, occupancy
from svdq.pipeline.trace import Span, num_steps

#: Ideal times this close count as equal: values in a JSON file went through divisions.
_EVEN_WITHIN = 0.01
#: Ranks whose step times differ by less count as equal: a mean over a run includes its settling shares.
_LIKE_THE_OTHERS = 0.1


#: Ranks of one group at most: what is above is a mistake.
_MAX_RANKS = 4096
#: Any unit of time: some thousand years in microseconds.
_Time = Annotated[float, Field(ge=0, le=1e17)]
_Positive = Annotated[float, Field(ge=1e-9, le=1e17)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Arguments(_Record):
    job: str


class _Event(_Record):
    """A complete event of a trace, as `Tracer.events` writes it; times in microseconds."""

    name: str
    pid: int = Field(ge=0, lt=_MAX_RANKS)
    tid: str | int
    ts: _Time
    dur: float
    args: _Arguments


class _Run(_Record):
    """What is used of a run of `svdq bench --json`."""

    through: str
    ranks: int = Field(ge=1, le=_MAX_RANKS)
    steps: int = Field(ge=1, le=1000)
    step_ms: _Positive
    encode_ms: _Time
    decode_ms: _Time
    per_sample_mean_s: _Positive
    efficiency: _Positive
    steps_per_rank: list[_Time]


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
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise InputError(
            f"{path} cannot be read ({reason}); give a file of svdq bench --json or of --trace."
        ) from error
    try:
        if isinstance(document, dict) and document.get("runs"):
            return _from_runs([_Run.model_validate(run) for run in document["runs"]], str(path))
        if isinstance(document, dict) and "traceEvents" in document:
            return from_spans(_spans(document["traceEvents"]), str(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _not_ours(path, f"{where}: {first['msg']}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise _not_ours(path, f"{type(error).__name__}: {error}") from error
    raise InputError(f"{path} is no recording; give a file of svdq bench --json, svdq bench --trace or worker --trace.")


def _not_ours(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is not a recording of this version of svdq ({reason}); record it again.")


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
    """Take the spans of each rank out of trace events."""
    work = [_Event.model_validate(event) for event in events if event["ph"] == "X"]
    spans: list[list[Span]] = [[] for _ in range(max((event.pid for event in work), default=-1) + 1)]
    for event in work:
        start_s = event.ts / 1e6
        spans[event.pid].append(
            Span(
                name=event.name,
                job_id=event.args.job,
                start_s=start_s,
                # The wall clock may have been set back meanwhile.
                end_s=start_s + max(0.0, event.dur) / 1e6,
                thread=str(event.tid),
            )
        )
    return spans


def _from_runs(runs: Sequence[_Run], source: str) -> Profile:
    """Take the largest group of a bench; what hand-overs cost comes from all its groups."""
    pipelines = [run for run in runs if run.through != "replicas"]
    if not pipelines:
        raise InputError(f"{source} has no run through a pipeline in it; run svdq bench with --json.")
    run = max(pipelines, key=lambda run: run.ranks)
    pace_s = run.per_sample_mean_s
    costs = _costs_of(run)
    overheads_s = [one.per_sample_mean_s * (1 - one.efficiency) for one in pipelines if one.ranks > 1]
    return Profile(
        source=f"{source}, {run.ranks} ranks",
        video=VideoCosts(steps=run.steps, costs=costs, overhead_s=max(0.0, median(overheads_s or [0.0]))),
        pace_s=pace_s,
        # From the costs of a video on each rank. The busy share also includes that a finite run ends earlier for it.
        ranks=tuple(
            _rank_of_run(
                steps * step_s / pace_s,
                costs.encode_s / pace_s if rank == 0 else 0.0,
                costs.decode_s / pace_s if rank == run.ranks - 1 else 0.0,
            )
            for rank, (steps, step_s) in enumerate(zip(run.steps_per_rank, costs.step_s, strict=True))
        ),
    )


def _rank_of_run(steps: float, encode: float, decode: float) -> RankTime:
    encode, decode = min(encode, 1.0), min(decode, 1.0)
    # The mean over a run that began with other shares may slightly exceed the available time.
    steps = max(0.0, min(steps, 1 - encode - decode))
    idle = max(0.0, 1 - steps - encode - decode)
    return RankTime(encode=encode, steps=steps, decode=decode, waits={Cause.UNKNOWN: idle})


def _costs_of(run: _Run) -> Costs:
    """Give the costs of a run, of which the median step is known, and of unequal ranks how many steps each took."""
    typical_s = run.step_ms / 1000
    even = Costs(step_s=(typical_s,) * run.ranks, encode_s=run.encode_ms / 1000, decode_s=run.decode_ms / 1000)
    fair_s = run.efficiency * run.per_sample_mean_s
    if abs(fair_time_s(run.steps, even) / fair_s - 1) < _EVEN_WITHIN:
        return even
    # Fair shares make all ranks equally busy, so a rank with fewer steps is proportionally slower.
    step_s = [
        (fair_s - fixed_s) / steps if steps >= 1 and fair_s > fixed_s else typical_s
        for fixed_s, steps in zip(even.fixed_s, run.steps_per_rank, strict=True)
    ]
    return replace(
        even, step_s=tuple(typical_s if abs(one_s / typical_s - 1) < _LIKE_THE_OTHERS else one_s for one_s in step_s)
    )


def _median_of(spans: Sequence[Sequence[Span]], name: str) -> float:
    return median([span.end_s - span.start_s for of in spans for span in of if span.name == name] or [0.0])
