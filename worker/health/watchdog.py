"""Ends a rank that makes no progress, so that its group is restarted. Knows no Redis and no GPU.

Stands before a rank's monitor and sees the same steps. What it measures time with is its own wake-ups: a process that
was paused as a whole (SIGSTOP, a laptop's lid) slept just as the rank did, and so has nothing to report.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, Literal

from svdq.pipeline.costs import Shape
from svdq.pipeline.sample import Sample
from svdq.pipeline.transport.ports import Monitor

logger = logging.getLogger(__name__)

#: Seconds between looks while something is computed; while nothing is, the watchdog sleeps until something is.
LOOK_S: Final = 5.0
#: A step may take this many times as long as the slowest of its kind so far, and this many seconds in any case.
FACTOR: Final = 20.0
SHORTEST_BOUND_S: Final = 60.0
#: Looks in the shortest time after which a rank may be ended.
MIN_LOOKS: Final = 4

#: A kind of work: the shape of the video, and what is done for it.
Kind = tuple[Shape, Literal["encode", "warm-up", "step", "decode"]]


class Watchdog:
    """A monitor that watches what it is told, and passes it on."""

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
        """Begin to watch the thread that calls this.

        Args:
            monitor: to pass everything on to.
            rank: for the report.
            first_bound_s: seconds that the first step of a kind may take, which may have to choose kernels and reserve
                memory; where this is less than the next two allow, they are less, too.
            on_stall: what to do after the report; the process ends after it.
            look_s: seconds between looks.
            shortest_bound_s: seconds that any step may take.
        """
        self._monitor = monitor
        self._rank = rank
        self._on_stall = on_stall
        self._look_s = min(look_s, first_bound_s / MIN_LOOKS)
        self._shortest_bound_s = min(shortest_bound_s, first_bound_s)
        self._first_bound_s = first_bound_s
        self._watched = threading.get_ident()
        #: What is being computed, and how many looks have found it so; replaced as a whole by the step loop.
        self._work: _Work | None = None
        self._sample: Sample | None = None
        self._shape: Shape | None = None
        #: Seconds of the slowest by kind.
        self._slowest_s: dict[Kind, float] = {}
        #: Whether the watchdog looks of its own accord; else it must be woken.
        self._is_awake = False
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    # The monitor, in the step loop.

    def step(self, sample: Sample, index: int) -> None:
        """Take a step for the end of the one before and the beginning of another."""
        before = self._work
        # Of a video that is taken up again it is said twice where it begins; nothing is computed in between.
        is_said_again = (
            before is not None
            and (before.sample.job_id, before.index) == (sample.job_id, index)
            and bool(before.sample.tensors)
        )
        if not is_said_again:
            self._learn()
        if sample is not self._sample:
            self._sample, self._shape = sample, Shape.of(sample.parameters)
        assert self._shape is not None
        if index == sample.parameters.steps:
            kind: Kind = (self._shape, "decode")
        else:
            # Before its photo is encoded a sample has no tensors.
            kind = (self._shape, "step" if sample.tensors else "encode")
        self._watch(_Work(sample, index, kind))
        self._monitor.step(sample, index)

    def warm_up(self, sample: Sample) -> None:
        """Take this as the beginning of work of its own kind; until `idle`."""
        self._watch(_Work(sample, 0, (Shape.of(sample.parameters), "warm-up")))
        self._monitor.warm_up(sample)

    def idle(self) -> None:
        """Watch nothing until the next step."""
        self._learn()
        self._work = self._sample = None
        self._monitor.idle()

    def cancelled(self, job_id: str) -> bool:
        """Pass the question on."""
        return self._monitor.cancelled(job_id)

    def _watch(self, work: "_Work") -> None:
        self._work = work
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def _learn(self) -> None:
        """Note how long the step that has just ended took, pauses of the process left out."""
        work = self._work
        if work is not None:
            # A pause lengthens what the clock says, but not the number of looks.
            took_s = min(time.monotonic() - work.began_at, (work.num_looks + 1) * self._look_s)
            if took_s > self._slowest_s.get(work.kind, 0.0):
                self._slowest_s[work.kind] = took_s

    # The watchdog's own thread.

    def _run(self) -> None:
        while True:
            work = self._work
            if work is None:
                self._is_awake = False
                # Asked again: a step may have begun before it could see that nobody looks.
                if self._work is None:
                    self._wake.wait()
                self._wake.clear()
                self._is_awake = True
                continue
            time.sleep(self._look_s)
            work.num_looks += 1
            waited_s = work.num_looks * self._look_s
            if work is self._work and waited_s > self._bound_s(work.kind):
                self._report(work, waited_s)
                self._on_stall()
                return

    def _bound_s(self, kind: Kind) -> float:
        slowest_s = self._slowest_s.get(kind)
        return self._first_bound_s if slowest_s is None else max(self._shortest_bound_s, FACTOR * slowest_s)

    def _report(self, work: "_Work", waited_s: float) -> None:
        shape, doing = work.kind
        slowest_s = self._slowest_s.get(work.kind)
        what = f"step {work.index + 1} of {work.sample.parameters.steps}" if doing == "step" else f"the {doing}"
        usual = "none of this kind has been done yet" if slowest_s is None else f"at most {slowest_s:.3g} s so far"
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"
        logger.error(
            "Rank %d makes no progress: %s of job %s (%dx%d, %d frames) has taken %.0f s, %s. "
            "The rank ends now, for its group to be restarted; it was in:\n%s",
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


class _Work:
    """One step, as it is watched."""

    __slots__ = ("began_at", "index", "kind", "num_looks", "sample")

    def __init__(self, sample: Sample, index: int, kind: Kind) -> None:
        self.sample = sample
        self.index = index
        self.kind = kind
        self.began_at = time.monotonic()
        #: How often the watchdog has woken up and found it.
        self.num_looks = 0
