"""Reads files of `svdq bench --json` and `--trace`: the costs of a video, and how busy each rank was."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.costs import Costs
from svdq.pipeline.errors import InputError
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.trace import Span, num_steps

#: Ranks of one group at most: what is above is a mistake.
_MAX_RANKS = 4096
#: Videos that wait to be written, and the one being written, at which ranks have to wait.
_WRITER_IS_FULL = 3
#: Any unit of time: some thousand years in microseconds.
_Time = Annotated[float, Field(ge=0, le=1e17)]
_Positive = Annotated[float, Field(ge=1e-9, le=1e17)]


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Shares of the time of one rank."""

    encode: float = 0.0
    steps: float = 0.0
    decode: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the time in which it computed for videos."""
        return self.encode + self.steps + self.decode


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured group: the costs of its videos, and what its ranks did."""

    #: Description of the source, for display.
    source: str
    #: The costs of a video, with a step time for each of the K ranks.
    video: VideoCosts
    #: By rank.
    ranks: tuple[RankTime, ...]
    #: Share of the time of all ranks in which they were idle while fewer videos were in flight than there are ranks.
    no_jobs: float = 0.0
    #: The same while finished videos waited to be written.
    writing: float = 0.0

    @property
    def busy(self) -> float:
        """Mean busy share of the ranks."""
        return sum(rank.busy for rank in self.ranks) / len(self.ranks)


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
    segments: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    step_ms: _Positive
    encode_ms: _Time
    decode_ms: _Time
    per_sample_mean_s: _Positive
    busy_share: list[Annotated[float, Field(ge=0, le=1.01)]] = Field(min_length=1, max_length=_MAX_RANKS)


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
    raise InputError(
        f"{path} is no recording; give a file of svdq bench --json (without --burst), of svdq bench --trace or of "
        "worker --trace."
    )


def _not_ours(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is not a recording of this version of svdq ({reason}); record it again.")


def _from_runs(runs: Sequence[_Run], source: str) -> Profile:
    """Take the largest group of a bench."""
    pipelines = [run for run in runs if run.through != "replicas"]
    if not pipelines:
        raise InputError(f"{source} has no run through a pipeline in it; run svdq bench with --json.")
    run = max(pipelines, key=lambda run: run.ranks)
    costs = Costs(
        step_s=(run.step_ms / 1000,) * run.ranks, encode_s=run.encode_ms / 1000, decode_s=run.decode_ms / 1000
    )
    return Profile(
        source=f"{source}, {run.ranks} ranks",
        video=VideoCosts(steps=run.steps, costs=costs, segments=run.segments),
        ranks=tuple(RankTime(steps=min(1.0, share)) for share in run.busy_share),
    )


def from_spans(spans: Sequence[Sequence[Span]], source: str) -> Profile:
    """Build the profile of a run from the spans of its ranks.

    Raises:
        InputError: no video was finished in the run.
    """
    if not any(span.name == "decode" for of in spans for span in of):
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
    work = [[span for span in of if _kind(span)] for of in spans]
    start_s = min(span.start_s for of in work for span in of)
    end_s = max(span.end_s for of in spans for span in of)
    no_jobs, writing = _causes(spans, work, start_s, end_s)
    return Profile(
        source=source,
        video=VideoCosts(
            steps=round(median(count for count in steps.values() if count)),
            costs=Costs(
                step_s=tuple(median(times) if times else median(known) for times in step_s),
                encode_s=_median_of(spans, "encode"),
                decode_s=_median_of(spans, "decode"),
            ),
        ),
        ranks=tuple(_rank_time(of, end_s - start_s) for of in work),
        no_jobs=no_jobs,
        writing=writing,
    )


def _spans(events: Sequence[dict[str, Any]]) -> list[list[Span]]:
    """Take the spans of each rank out of trace events."""
    work = [_Event.model_validate(event) for event in events if event["ph"] == "X"]
    spans: list[list[Span]] = [[] for _ in range(max((event.pid for event in work), default=-1) + 1)]
    for event in work:
        start_s = event.ts / 1e6
        # The wall clock may have been set back meanwhile.
        end_s = start_s + max(0.0, event.dur) / 1e6
        span = Span(name=event.name, job_id=event.args.job, start_s=start_s, end_s=end_s, thread=str(event.tid))
        spans[event.pid].append(span)
    return spans


def _kind(span: Span) -> str:
    """Return encode, steps or decode; "" for anything besides a video's work, such as a warm-up or a write."""
    kind = span.name.partition(" ")[0]
    return kind if kind in {"encode", "steps", "decode"} else ""


def _nested(work: Sequence[Span]) -> list[Span]:
    """Return the encodes that a rank did between two steps of another video, within the span of those steps."""
    nested, steps_until_s = [], 0.0
    for span in sorted(work, key=lambda span: span.start_s):
        if _kind(span) == "steps":
            steps_until_s = span.end_s
        elif _kind(span) == "encode" and span.end_s <= steps_until_s:
            nested.append(span)
    return nested


def _rank_time(work: Sequence[Span], whole_s: float) -> RankTime:
    seconds = dict.fromkeys(("encode", "steps", "decode"), 0.0)
    for span in work:
        seconds[_kind(span)] += span.end_s - span.start_s
    seconds["steps"] -= sum(span.end_s - span.start_s for span in _nested(work))
    return RankTime(**{kind: time_s / max(whole_s, 1e-9) for kind, time_s in seconds.items()})


def _causes(
    spans: Sequence[Sequence[Span]], work: Sequence[Sequence[Span]], start_s: float, end_s: float
) -> tuple[float, float]:
    """Return the shares of the ranks' time that were idle for want of jobs, and for want of a faster storage."""
    num_ranks = len(work)
    begun: dict[str, float] = {}
    decoded: dict[str, float] = {}
    for span in sorted((span for of in work for span in of), key=lambda span: span.end_s):
        begun[span.job_id] = min(begun.get(span.job_id, span.start_s), span.start_s)
        decoded[span.job_id] = span.end_s
    written = {span.job_id: span.end_s for of in spans for span in of if span.name == "write"}
    # Changes over time of: busy ranks, videos in flight, videos that are decoded and not written.
    changes: list[tuple[float, int, int, int]] = []
    for of in work:
        for span in of:
            changes += [(span.start_s, 1, 0, 0), (span.end_s, -1, 0, 0)]
        # Within other work, so the rank counts as busy once.
        for span in _nested(of):
            changes += [(span.start_s, -1, 0, 0), (span.end_s, 1, 0, 0)]
    for job_id, begun_s in begun.items():
        changes += [(begun_s, 0, 1, 0), (decoded[job_id], 0, -1, 0)]
        if job_id in written:
            changes += [(decoded[job_id], 0, 0, 1), (max(written[job_id], decoded[job_id]), 0, 0, -1)]
    no_jobs_s = writing_s = 0.0
    for lasted_s, busy, in_flight, unwritten in _periods(sorted(changes), end_s):
        idle_s = max(0, num_ranks - busy) * lasted_s
        if unwritten >= _WRITER_IS_FULL:
            writing_s += idle_s
        elif in_flight < num_ranks:
            no_jobs_s += idle_s
    whole_s = max((end_s - start_s) * num_ranks, 1e-9)
    return no_jobs_s / whole_s, writing_s / whole_s


def _periods(changes: Sequence[tuple[float, int, int, int]], end_s: float) -> Iterator[tuple[float, int, int, int]]:
    """Yield the length of each period between two changes with the counts during it."""
    counts = (0, 0, 0)
    for (at_s, *change), following in zip(changes, [*changes[1:], (end_s, 0, 0, 0)], strict=True):
        counts = (counts[0] + change[0], counts[1] + change[1], counts[2] + change[2])
        yield following[0] - at_s, *counts


def _median_of(spans: Sequence[Sequence[Span]], name: str) -> float:
    return median([span.end_s - span.start_s for of in spans for span in of if span.name == name] or [0.0])
