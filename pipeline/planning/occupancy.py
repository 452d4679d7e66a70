"""Derives the work and the waits of each rank from the spans of a recorded run. Pure code.

A trace has spans of work only. The cause of a wait follows from where the videos were meanwhile: one that was done on
the previous rank and not started here was on its way; several that were done here and not started on the next rank mean
that it had no room; none on earlier ranks means that there was no job.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from svdq.pipeline.trace import Span

#: Capacity of a link in videos: one received ahead of need, one on its way, and one that waits.
_LINK_IS_FULL = 3
#: Number of videos waiting to be written, and the one being written, at which the last rank has to wait.
_WRITER_IS_FULL = 3
_WORK = ("encode", "steps ", "decode")
_WARM_UP = "warm-up"


class Cause(StrEnum):
    """Why a rank was idle."""

    #: Its first video had not reached it, or its last had left.
    FILLING = "filling"
    DRAINING = "draining"
    #: Rank 0 had no job, so no rank had one.
    JOBS = "jobs"
    #: A hand-over to it was on its way.
    TRANSFER = "transfer"
    #: The previous rank was still working on the next video.
    BEFORE = "rank before"
    #: The next rank had no room for what was done here.
    AFTER = "rank after"
    #: Videos waited to be written.
    WRITING = "writing"
    #: The recording does not show the cause.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Shares of the time of one rank; with its waits they add up to 1."""

    encode: float = 0.0
    steps: float = 0.0
    decode: float = 0.0
    warm_up: float = 0.0
    #: Share of the time for each cause.
    waits: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Share of the time in which it computed for videos."""
        return self.encode + self.steps + self.decode

    def waited(self, *causes: Cause) -> float:
        """Return the share of the time spent waiting for these causes."""
        return sum(self.waits.get(cause, 0.0) for cause in causes)


def occupancy(spans: Sequence[Sequence[Span]]) -> tuple[RankTime, ...]:
    """Compute what each rank did between the start of the first video and the end of the last.

    Args:
        spans: spans of each rank, in any order, with at least one of work.
    """
    start_s = min(span.start_s for of in spans for span in of if span.name.startswith(_WORK))
    end_s = max(span.end_s for of in spans for span in of)
    # A group warms up before it has anything to do, so the warm-up is not part of the run.
    begun = [[replace(span, start_s=max(span.start_s, start_s)) for span in of if span.end_s > start_s] for of in spans]
    road = _Road(begun)
    return tuple(_rank_time(road, rank, start_s, end_s) for rank in range(len(spans)))


def handing_over(spans: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """Measure hand-overs: seconds until an awaited one arrives, and seconds between two videos when one is there."""
    road = _Road(spans)
    arriving, turning = [], []
    for rank in range(1, len(spans)):
        for (_, _, done_s), (job, begun_s, _) in itertools.pairwise(road.visits(rank)):
            left_s = road.arrived(job, rank)
            if left_s is None:
                continue
            if left_s >= done_s:
                arriving.append(begun_s - left_s)
            elif road.cause(rank, (done_s + begun_s) / 2) is Cause.TRANSFER:  # and not held up by what comes after
                turning.append(begun_s - done_s)
    return max(0.0, median(arriving or [0.0])), max(0.0, median(turning or [0.0]))


class _Road:
    """The position of all videos of a run over time."""

    def __init__(self, spans: Sequence[Sequence[Span]]) -> None:
        #: Work of each rank, in order of time.
        self.work = [
            sorted((s for s in of if s.name.startswith((*_WORK, _WARM_UP))), key=lambda s: s.start_s) for of in spans
        ]
        self._first = [_by_job(of, last=False) for of in self.work]
        self._last = [_by_job(of, last=True) for of in self.work]
        #: For each rank, when videos could start there and when they started; both ascending. In between they wait.
        self._ready: list[list[float]] = []
        self._begun: list[list[float]] = []
        for rank in range(len(spans)):
            pairs = [(self.arrived(job, rank), begun_s) for job, begun_s in self._first[rank].items()]
            known = [(arrived_s, begun_s) for arrived_s, begun_s in pairs if arrived_s is not None]
            self._ready.append(sorted(arrived_s for arrived_s, _ in known))
            self._begun.append(sorted(begun_s for _, begun_s in known))
        writes = sorted((s for of in spans for s in of if s.name == "write"), key=lambda s: s.end_s)
        self._decoded = sorted(s.end_s for s in self.work[-1] if s.name == "decode")
        self._written = [span.end_s for span in writes]
        self._moments = sorted({m for of in spans for s in of for m in (s.start_s, s.end_s)})

    def visits(self, rank: int) -> list[tuple[str, float, float]]:
        """Return the jobs that a rank worked on, with their start and end there, in order."""
        return [(job, begun_s, self._last[rank][job]) for job, begun_s in self._first[rank].items()]

    def arrived(self, job: str, rank: int) -> float | None:
        """Return when the previous ranks finished a job; None if none of them had it."""
        return next((self._last[r][job] for r in range(rank - 1, -1, -1) if job in self._last[r]), None)

    def moments(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Split a period wherever any work starts or ends."""
        inner = self._moments[bisect_right(self._moments, start_s) : bisect_right(self._moments, end_s)]
        cuts = [start_s, *(m for m in inner if m < end_s), end_s]
        return itertools.pairwise(cuts)

    def cause(self, rank: int, at_s: float) -> Cause:
        """Return why a rank is idle at a time between its first work and its last."""
        if rank + 1 < len(self.work):
            if self._waiting_for(rank + 1, at_s) >= _LINK_IS_FULL:
                return Cause.AFTER
        elif self._written and _between(self._decoded, self._written, at_s) >= _WRITER_IS_FULL:
            return Cause.WRITING
        if self._waiting_for(rank, at_s):
            return Cause.TRANSFER
        if rank == 0:
            return Cause.JOBS
        if self._is_at_work(rank - 1, at_s):
            return Cause.BEFORE
        return self.cause(rank - 1, at_s)

    def _waiting_for(self, rank: int, at_s: float) -> int:
        return _between(self._ready[rank], self._begun[rank], at_s)

    def _is_at_work(self, rank: int, at_s: float) -> bool:
        work = self.work[rank]
        index = bisect_right(work, at_s, key=lambda span: span.start_s) - 1
        return index >= 0 and work[index].end_s > at_s


def _rank_time(road: _Road, rank: int, start_s: float, end_s: float) -> RankTime:
    work = road.work[rank]
    whole_s = max(end_s - start_s, 1e-9)
    seconds = dict.fromkeys(("encode", "steps", "decode", _WARM_UP), 0.0)
    waits: dict[Cause, float] = {}

    def wait(cause: Cause, from_s: float, to_s: float) -> None:
        if to_s > from_s:
            waits[cause] = waits.get(cause, 0.0) + (to_s - from_s) / whole_s

    for span in work:
        seconds[span.name.partition(" ")[0]] += span.end_s - span.start_s
    videos = [span for span in work if span.name != _WARM_UP]
    if not videos:
        wait(Cause.UNKNOWN, start_s, end_s)
    else:
        warming_s = sum(span.end_s - span.start_s for span in work if span.end_s <= videos[0].start_s)
        wait(Cause.FILLING, start_s + warming_s, videos[0].start_s)
        for before, after in itertools.pairwise(work):
            if before.end_s < videos[0].start_s:
                continue
            for from_s, to_s in road.moments(before.end_s, after.start_s):
                wait(road.cause(rank, (from_s + to_s) / 2), from_s, to_s)
        wait(Cause.DRAINING, work[-1].end_s, end_s)
    return RankTime(
        encode=seconds["encode"] / whole_s,
        steps=seconds["steps"] / whole_s,
        decode=seconds["decode"] / whole_s,
        warm_up=seconds[_WARM_UP] / whole_s,
        waits=waits,
    )


def _by_job(work: Sequence[Span], *, last: bool) -> dict[str, float]:
    """Return when each job started, or ended, here."""
    times: dict[str, float] = {}
    for span in work:
        if span.job_id:
            if last:
                times[span.job_id] = span.end_s
            else:
                times.setdefault(span.job_id, span.start_s)
    return times


def _between(entered: Sequence[float], left: Sequence[float], at_s: float) -> int:
    return bisect_right(entered, at_s) - bisect_right(left, at_s)
