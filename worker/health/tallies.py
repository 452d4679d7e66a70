"""What a rank has done since it was started, in sums and histograms that only ever grow. Knows no Redis.

The step loop counts a stage at its end, not its steps one by one. Each tally is written by one thread and may be read
by any other: what it reads may be one entry old, and is never torn.
"""

import contextlib
import time
from bisect import bisect_left

from svdq.pipeline.trace import Tracer
from svdq.producer.status.ranks import BOUNDS_S, Timings
from svdq.worker.recovery.shelf import Shelf


class Tally:
    """How long one kind of work took, as a histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count work that took so many seconds each of so many times."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += times
        self._sum_s += seconds * times

    def timings(self) -> Timings:
        """Give what was counted."""
        return Timings(counts=tuple(self._counts), sum_s=round(self._sum_s, 6))


class Tallies:
    """All that one rank counts."""

    def __init__(self) -> None:
        #: By the kind of work; encode, decode and write are the names of the spans that `TallyingTracer` sees.
        self.step, self.encode, self.decode, self.write = Tally(), Tally(), Tally(), Tally()
        #: Videos that were taken up again from a checkpoint.
        self.num_resumed = 0
        #: Checkpoints written, and their bytes.
        self.num_checkpoints = self.checkpoint_bytes = 0

    def timings(self) -> dict[str, Timings]:
        """Give the histograms of what was done at all, by the kind of work."""
        kinds = {"step": self.step, "encode": self.encode, "decode": self.decode, "write": self.write}
        found = {kind: tally.timings() for kind, tally in kinds.items()}
        return {kind: timings for kind, timings in found.items() if any(timings.counts)}


class TallyingTracer(Tracer):
    """A tracer that also counts how long encodes, decodes and writes take, whether spans are recorded or not."""

    def __init__(self, rank: int, tallies: Tallies, *, on: bool) -> None:
        super().__init__(rank, on=on)
        self._tallies = {"encode": tallies.encode, "decode": tallies.decode, "write": tallies.write}

    def span(self, name: str, job_id: str = "") -> contextlib.AbstractContextManager[None]:
        """Record the work done inside."""
        span = super().span(name, job_id)
        tally = self._tallies.get(name)
        return span if tally is None else _TalliedSpan(span, tally)


class _TalliedSpan:
    __slots__ = ("_span", "_started", "_tally")

    def __init__(self, span: contextlib.AbstractContextManager[None], tally: Tally) -> None:
        self._span = span
        self._tally = tally
        self._started = 0.0

    def __enter__(self) -> None:
        self._span.__enter__()
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._tally.add(time.perf_counter() - self._started)
        self._span.__exit__(None, None, None)


class TallyingShelf:
    """A shelf that counts what is written to another one."""

    def __init__(self, shelf: Shelf, tallies: Tallies) -> None:
        self._shelf = shelf
        self._tallies = tallies
        self.open, self.steps, self.read = shelf.open, shelf.steps, shelf.read
        self.clear, self.ages_s = shelf.clear, shelf.ages_s

    def write(self, job_id: str, step: int, data: bytes | memoryview) -> None:
        """Write, and count it when that went well."""
        self._shelf.write(job_id, step, data)
        self._tallies.num_checkpoints += 1
        self._tallies.checkpoint_bytes += len(data)
