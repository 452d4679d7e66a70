"""Ends a rank that makes no progress, so that its group is restarted. Does not import Redis.

A thread wakes up every few seconds while something is computed. It measures time by the number of its wake-ups: while a
process is paused as a whole (SIGSTOP), neither the step nor the thread runs.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from svdq.pipeline.loop.protocols import Monitor
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.planning.costs import Shape
from svdq.worker.queue.crashes import Phase, phase_of

logger = logging.getLogger(__name__)

#: Seconds between wake-ups while something is computed.
LOOK_S: Final = 5.0
#: A step may take this many times as long as the slowest of its kind so far, and at least this many seconds.
FACTOR: Final = 20.0
SHORTEST_BOUND_S: Final = 60.0
#: Number of wake-ups within the shortest bound.
MIN_LOOKS: Final = 4

#: A kind of work: the shape of the video, and what is done for it.
Kind = tuple[Shape, Phase]


@dataclass
class StepBounds:
    """The seconds that work of each kind may take."""

    #: For the first of its kind, which may have to choose kernels and reserve memory.
    first_s: float
    #: For any further one, at least.
    shortest_s: float
    #: What the slowest of each kind took.
    slowest_s: dict[Kind, float] = field(default_factory=dict)

    def learn(self, kind: Kind, took_s: float) -> None:
        """Record how long work took."""
        self.slowest_s[kind] = max(took_s, self.slowest_s.get(kind, 0.0))

    def bound_s(self, kind: Kind) -> float:
        """Return how long work of a kind may take."""
        slowest_s = self.slowest_s.get(kind)
        return self.first_s if slowest_s is None else max(self.shortest_s, FACTOR * slowest_s)


@dataclass(eq=False)
class _Work:
    """One step that is watched."""

    sample: Sample
    index: int
    kind: Kind
    began_at: float = field(default_factory=time.monotonic)
    #: Number of wake-ups of the watchdog so far.
    num_looks: int = 0


class Watchdog(Monitor):
    """A monitor that watches the steps reported to it, and passes them on to another monitor."""

    def __init__(
        self,
        monitor: Monitor,
        rank: int,
        first_bound_s: float,
        *,
        on_stall: Callable[[], None],
        look_s: float = LOOK_S,
        shortest_bound_s: float = SHORTEST_BOUND_S,
    ) -> None:
        """Watch the thread that calls this; `on_stall` is called after the report and ends the process.

        The first step of a kind may take `first_bound_s`, any step `shortest_bound_s`.
        """
        self._monitor = monitor
        self._rank = rank
        self._on_stall = on_stall
        self._look_s = min(look_s, first_bound_s / MIN_LOOKS)
        self._watched = threading.get_ident()
        self.bounds = StepBounds(first_bound_s, min(shortest_bound_s, first_bound_s))
        #: What is being computed; replaced as a whole by the step loop.
        self._work: _Work | None = None
        self._is_busy = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    # The monitor, in the step loop.

    def step(self, sample: Sample, index: int) -> None:
        """Record the end of the step before and the beginning of another."""
        before, work = self._work, _Work(sample, index, (Shape.of(sample.parameters), phase_of(sample, index)))
        # The first step of a resumed video is reported twice, with no work in between.
        if before is None or (before.sample.job_id, before.index, before.kind) != (sample.job_id, index, work.kind):
            self._learn()
        self._watch(work)
        self._monitor.step(sample, index)

    def warm_up(self, sample: Sample) -> None:
        """Record the beginning of a warm-up, which lasts until `idle`."""
        self._watch(_Work(sample, 0, (Shape.of(sample.parameters), "warm-up")))
        self._monitor.warm_up(sample)

    def idle(self) -> None:
        """Record the end of the step before; watch nothing until the next one."""
        self._learn()
        self._work = None
        self._is_busy.clear()
        self._monitor.idle()

    def canceled(self, job_id: str) -> bool:
        """Return the monitor's answer."""
        return self._monitor.canceled(job_id)

    def _watch(self, work: _Work) -> None:
        self._work = work
        self._is_busy.set()

    def _learn(self) -> None:
        work = self._work
        if work is not None:
            self.bounds.learn(work.kind, time.monotonic() - work.began_at)

    # The watchdog's thread.

    def _run(self) -> None:
        while True:
            self._is_busy.wait()
            time.sleep(self._look_s)
            work = self._work
            if work is None:
                continue
            work.num_looks += 1
            waited_s = work.num_looks * self._look_s
            if work is self._work and waited_s > self.bounds.bound_s(work.kind):
                self._report(work, waited_s)
                self._on_stall()
                return

    def _report(self, work: _Work, waited_s: float) -> None:
        shape, doing = work.kind
        slowest_s = self.bounds.slowest_s.get(work.kind)
        what = f"step {work.index + 1} of {work.sample.parameters.steps}" if doing == "step" else f"the {doing}"
        usual = "none of this kind has been done yet" if slowest_s is None else f"at most {slowest_s:.3g} s so far"
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
        logger.error(
            "Rank %d makes no progress: %s of job %s (%dx%d, %d frames) has taken %.0f s, %s. "
            "The rank ends now, and its group restarts. Its stack:\n%s",
            self._rank,
            what,
            work.sample.job_id,
            shape.width,
            shape.height,
            shape.frames,
            waited_s,
            usual,
            stack.rstrip(),
        )
