"""What each rank did all through a recorded run: its work, and what it waited for when it did none. Pure.

A trace has spans of work only. What a rank waited for follows from where the videos were meanwhile: one that was done
on the rank before and not begun here was on its way; several that were done here and not begun on the rank after mean
that it could not take them; none anywhere before means that there was no job.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from svdq.pipeline.trace import Span

#: Videos that a link holds: one received ahead of need, one on its way, and the one that has to wait.
_LINK_IS_FULL = 3
#: Videos that wait to be written, and the one that is written, before the last rank has to wait.
_WRITER_IS_FULL = 3
_WORK = ("encode", "steps ", "decode")
_WARM_UP = "warm-up"


class Cause(StrEnum):
    """Why a rank did nothing."""

    #: Its first video had not reached it, or its last had left.
    FILLING = "filling"
    DRAINING = "draining"
    #: Rank 0 had no job, and so had nobody.
    JOBS = "jobs"
    #: A hand-over to it was on its way.
    TRANSFER = "transfer"
    #: The rank before it was still at work on the next video.
    BEFORE = "rank before"
    #: The rank after it had no room for what was done here.
    AFTER = "rank after"
    #: Videos waited to be written.
    WRITING = "writing"
    #: The recording does not tell.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Shares of the time of one rank; with its waits they add up to 1."""

    encode: float = 0.0
    steps: float = 0.0
    decode: float = 0.0
    warm_up: float = 0.0
    #: Of the time, for each cause that there was.
    waits: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Share of the time in which it computed for videos."""
        return self.encode + self.steps + self.decode

    def waited(self, *causes: Cause) -> float:
        """Share of the time that it waited for these."""
        return sum(self.waits.get(cause, 0.0) for cause in causes)


def occupancy(spans: Sequence[Sequence[Span]]) -> tuple[RankTime, ...]:
    """Say what each rank did between the first work on a video and the end of the last.

    Args:
        spans: of each rank, in any order; there is work in them.
    """
    start_s = min(span.start_s for of in spans for span in of if span.name.startswith(_WORK))
    end_s = max(span.end_s for of in spans for span in of)
    # A group warms up before it has anything to do; that is none of the run's time.
    begun = [[replace(span, start_s=max(span.start_s, start_s)) for span in of if span.end_s > start_s] for of in spans]
    road = _Road(begun)
    return tuple(_rank_time(road, rank, start_s, end_s) for rank in range(len(spans)))


def handing_over(spans: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """Measure hand-overs: seconds until one arrives where it is awaited, and between two videos where one is there."""
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
    """Where the videos of a run were at any time."""

    def __init__(self, spans: Sequence[Sequence[Span]]) -> None:
        #: Of each rank, in order of time: its work.
        self.work = [
            sorted((s for s in of if s.name.startswith((*_WORK, _WARM_UP))), key=lambda s: s.start_s) for of in spans
        ]
        self._first = [_by_job(of, last=False) for of in self.work]
        self._last = [_by_job(of, last=True) for of in self.work]
        #: Of each rank: when a video could begin there, and when one began; each ascending. What lies between waits.
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
        """List the jobs that a rank worked on, with when they were begun and done there, in order."""
        return [(job, begun_s, self._last[rank][job]) for job, begun_s in self._first[rank].items()]

    def arrived(self, job: str, rank: int) -> float | None:
        """Say when the ranks before were done with a job; None when none of them had it."""
        return next((self._last[r][job] for r in range(rank - 1, -1, -1) if job in self._last[r]), None)

    def moments(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Cut a stretch of time wherever anything begins or ends."""
        inner = self._moments[bisect_right(self._moments, start_s) : bisect_right(self._moments, end_s)]
        cuts = [start_s, *(m for m in inner if m < end_s), end_s]
        return itertools.pairwise(cuts)

    def cause(self, rank: int, at_s: float) -> Cause:
        """Say why a rank does nothing at a moment between its first work and its last."""
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
    """Say when each job was begun, or done, here."""
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
