"""Histograms of a rank's work since its start, and the pace of its group. Does not import Redis.

The step loop counts a stage at its end, not its steps one by one. Readers may miss the newest entry of a histogram.
"""

import contextlib
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean

from svdq.pipeline.trace import Tracer
from svdq.producer.status.ranks import BOUNDS_S, Timings

#: Number of gaps between videos over which the pace is averaged.
WINDOW = 20


class Histogram:
    """The durations of one kind of work."""

    def __init__(self) -> None:
        #: Several threads write videos.
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` pieces of work that took `seconds` each."""
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, seconds)] += times
            self._sum_s += seconds * times

    @property
    def count(self) -> int:
        """Number of pieces of work so far."""
        return sum(self._counts)

    def timings(self) -> Timings:
        """Return the counts and their sum."""
        return Timings(counts=tuple(self._counts), sum_s=round(self._sum_s, 6))


class TimingTracer(Tracer):
    """A tracer that also measures encodes, decodes and writes, even if it records no spans."""

    def __init__(self, work: Mapping[str, Histogram], *, on: bool) -> None:
        """Make it; `work` has the histograms to fill, by the names of spans."""
        super().__init__(on=on)
        self._work = work

    def span(self, name: str, job_id: str = "") -> contextlib.AbstractContextManager[None]:
        """Record the work done inside."""
        span, histogram = super().span(name, job_id), self._work.get(name)
        return span if histogram is None else _timed(span, histogram)


@contextlib.contextmanager
def _timed(span: contextlib.AbstractContextManager[None], histogram: Histogram) -> Iterator[None]:
    started = time.perf_counter()
    try:
        with span:
            yield
    finally:
        histogram.add(time.perf_counter() - started)


class Pace:
    """The pace of a group: the average time between two finished videos, without times in which it was idle.

    It begins anew with a video that is more than twice as large, or less than half, as all of the last ones.
    """

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=WINDOW)
        #: The sizes of the last videos.
        self._sizes: deque[int] = deque(maxlen=WINDOW)
        #: When the last video was finished; None if the group has been idle since.
        self._last_s: float | None = None

    def finished(self, now_s: float, size: int) -> None:
        """Record that a video was finished, by any clock in seconds; its size in pixels, times its steps."""
        if not any(size <= 2 * other and other <= 2 * size for other in self._sizes):
            self._gaps_s.clear()
        elif self._last_s is not None:
            self._gaps_s.append(now_s - self._last_s)
        self._sizes.append(size)
        self._last_s = now_s

    def idle(self) -> None:
        """Record that nothing is in flight."""
        self._last_s = None

    @property
    def seconds(self) -> float | None:
        """Seconds between two finished videos; None until there were two in a row."""
        return fmean(self._gaps_s) if self._gaps_s else None
