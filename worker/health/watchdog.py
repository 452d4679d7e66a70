"""Ends a rank that makes no progress, so that its group is restarted."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from svdq.pipeline.loop.protocols import Monitor
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.planning.costs import Shape
from svdq.worker.queue.crashes import Phase, phase_of

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0  # seconds between two looks at a computation
FACTOR: Final = 20.0  # times the slowest step of its kind so far, and at least this many seconds
SHORTEST_BOUND_S: Final = 60.0

Kind = tuple[Shape, Phase]


@dataclass(frozen=True)
class _Work:
    sample: Sample
    index: int
    kind: Kind
    began_at: float


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
        """Watch the calling thread; the first step of a kind may take `first_bound_s`, any step `shortest_bound_s`."""
        self._monitor = monitor
        self._rank = rank
        self._on_stall = on_stall
        self._look_s = min(look_s, first_bound_s / 4)
        self._first_s, self._shortest_s = first_bound_s, min(shortest_bound_s, first_bound_s)
        self._watched = threading.get_ident()
        self.slowest_s: dict[Kind, float] = {}  # seconds of the slowest work of each kind
        self._work: _Work | None = None  # replaced as a whole by the step loop
        self._is_busy = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def bound_s(self, kind: Kind) -> float:
        """Return how long work of a kind may take, in seconds."""
        slowest_s = self.slowest_s.get(kind)
        return self._first_s if slowest_s is None else max(self._shortest_s, FACTOR * slowest_s)

    def step(self, sample: Sample, index: int) -> None:
        before, phase = self._work, phase_of(sample, index)
        # The first step of a resumed video is reported twice, with no work in between.
        if before is None or (before.sample.job_id, before.index, before.kind[1]) != (sample.job_id, index, phase):
            self._learn()
        self._watch(sample, index, phase)
        self._monitor.step(sample, index)

    def picture(self, sample: Sample, step: int, draw: Callable[[], Tensor | None]) -> None:
        self._monitor.picture(sample, step, draw)

    def warm_up(self, sample: Sample) -> None:
        self._watch(sample, 0, "warm-up")
        self._monitor.warm_up(sample)

    def loading(self, components: str, expected_s: float | None) -> None:
        """Pass it on; a load is not watched."""
        self._monitor.loading(components, expected_s)

    def idle(self) -> None:
        self._learn()
        self._work = None
        self._is_busy.clear()
        self._monitor.idle()

    def canceled(self, job_id: str) -> bool:
        return self._monitor.canceled(job_id)

    def _watch(self, sample: Sample, index: int, phase: Phase) -> None:
        self._work = _Work(sample, index, (Shape.of(sample.parameters), phase), time.monotonic())
        self._is_busy.set()

    def _learn(self) -> None:
        work = self._work
        if work is not None:
            self.slowest_s[work.kind] = max(time.monotonic() - work.began_at, self.slowest_s.get(work.kind, 0.0))

    def _run(self) -> None:
        while True:
            self._is_busy.wait()
            time.sleep(self._look_s)
            work = self._work
            if work is not None and time.monotonic() - work.began_at > self.bound_s(work.kind):
                self._report(work)
                self._on_stall()
                return

    def _report(self, work: _Work) -> None:
        shape, phase = work.kind
        slowest_s = self.slowest_s.get(work.kind)
        frame = sys._current_frames().get(self._watched)
        logger.error(
            "Rank %d makes no progress: %s of job %s (%s) has taken %.0f s, %s. "
            "The rank ends now, and its group restarts. Its stack:\n%s",
            self._rank,
            f"step {work.index + 1} of {work.sample.parameters.steps}" if phase == "step" else f"the {phase}",
            work.sample.job_id,
            f"{shape.width}x{shape.height}, {shape.frames} frames",
            time.monotonic() - work.began_at,
            "none of this kind has been done yet" if slowest_s is None else f"at most {slowest_s:.3g} s so far",
            "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(no stack)",
        )
