"""The samples that wait on a rank for its stage loop, in host memory, and those without units to warm up for.

A rank that works in rounds holds one set of components at a time, and has no neighbors.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from svdq.pipeline.loop.protocols import Monitor, Request
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.rounds import GATHER_S, Leg, Outlook, Rounds
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import on_host

logger = logging.getLogger(__name__)

#: Samples that may wait, and bytes of their tensors; one sample may wait whatever its size.
MAX_SAMPLES: Final = 8
MAX_BYTES: Final = 256 * 2**20


class Inbox:
    """The work that has arrived on a rank and is not begun.

    `put` blocks while it is full. The receiving thread then receives nothing more, so the ranks before this one have
    to wait, up to rank 0, which takes no more jobs. This cannot deadlock. The stage loop takes whatever has arrived
    and never waits for a certain sample, so a full inbox empties as soon as the loop can send what it has. It sends
    down the chain only. So whatever waits, waits for a later rank, and the last rank only for the sink, which waits for
    no rank: rank 0 receives its reports at all times.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int, Sample]] = []
        #: Keeps the order of arrival among equal indices: a warm-up before its sample.
        self._arrivals = itertools.count()
        self._num_bytes = 0
        self._closed = False
        self._released = False

    def put(self, work: Sample) -> None:
        """Add a sample, in any order, without waiting."""
        with self._changed:
            heapq.heappush(self._heap, (work.index, next(self._arrivals), work))
            self._num_bytes += sum(tensor.nbytes for tensor in work.tensors.values())
            self._changed.notify_all()

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait until a sample of so many bytes may be added; only one thread may."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._released
                    or not self._heap
                    or (len(self._heap) < MAX_SAMPLES and self._num_bytes + num_bytes <= MAX_BYTES)
                )
            )

    def take(self) -> Sample | None:
        """Wait for work and take the sample of the lowest index; None when no more comes, or after `release`."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._closed or self._released)
            if self._released or not self._heap:
                return None
            work = heapq.heappop(self._heap)[2]
            self._num_bytes -= sum(tensor.nbytes for tensor in work.tensors.values())
            self._changed.notify_all()
            return work

    def returned(self, sample: Sample, *, is_decoded: bool) -> Sample:
        """Take back a sample that `take` has given, after its units."""
        return sample

    def has_before(self, index: int) -> bool:
        """Whether work with a lower index waits."""
        with self._changed:
            return bool(self._heap) and self._heap[0][0] < index

    def close(self) -> None:
        """Have `take` return None when all is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def release(self) -> None:
        """Have `take` return None at once, and unblock `wait_for_room`; for a rank that stops."""
        with self._changed:
            self._released = True
            self._changed.notify_all()


class RoundsInbox(Inbox):
    """Hands out samples, which wait in host memory, for one leg at a time, and loads the components for it."""

    def __init__(self, model: VideoModel, monitor: Monitor, tracer: Tracer, most_bytes: float, num_groups: int) -> None:
        super().__init__()
        self.is_loading = False  # whether `take` loads components
        self._model = model
        self._monitor = monitor
        self._tracer = tracer
        self._rounds = Rounds(model.sets, most_bytes, num_groups)
        self._waiting: dict[int, Sample] = {}

    def wait_until_wanted(self) -> bool:
        """Wait until the round takes one more video; return False after `release`."""
        with self._changed:
            self._changed.wait_for(lambda: self._released or self._rounds.wants_more())
            return not self._released

    def expect(self, index: int, legs: Sequence[Leg], request: Request) -> None:
        """Announce a sample, which `put` adds later."""
        with self._changed:
            self._rounds.admit(
                index, legs, num_waiting=request.num_waiting, now=time.monotonic(), priority=request.priority
            )

    def put(self, work: Sample) -> None:
        """Add a sample that was admitted, or has done a leg."""
        tensors = on_host(work.tensors)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._changed:
            if work.step >= 0:
                self._rounds.state_bytes = max(self._rounds.state_bytes, num_bytes)
            self._waiting[work.index] = replace(work, tensors=tensors)
            self._changed.notify_all()

    def wait_for_room(self, num_bytes: int) -> None:
        """Return at once: the round has room for all that it takes."""

    def take(self) -> Sample | None:
        """Wait for a sample and take it, after its set of components is loaded; None at the end, or after `release`."""
        while True:
            with self._changed:
                index = None
                while index is None:
                    if self._released or (self._closed and not len(self._rounds)):
                        return None
                    index = self._canceled() if self._waiting else None
                    if index is not None:
                        return self._waiting.pop(index)  # it ends without any components
                    index = self._rounds.choose(time.monotonic())
                    self._changed.notify_all()  # a round may take videos now
                    if index not in self._waiting:
                        index = None
                        self._changed.wait(GATHER_S if len(self._rounds) else None)
                leg = self._rounds.leg(index)
                if leg.components == self._rounds.held:
                    return replace(self._waiting.pop(index), boundaries=(0, leg.stop))
            self._load(leg.components)

    def _canceled(self) -> int | None:
        canceled = self._monitor.canceled
        return next((index for index, sample in self._waiting.items() if canceled(sample.job_id)), None)

    def _load(self, components: str) -> None:
        self._monitor.loading(components, self._rounds.load_s.get(components))
        self.is_loading, started = True, time.perf_counter()
        with self._tracer.span(f"load {components}"):
            self._model.hold(components)
        seconds = time.perf_counter() - started
        number = self._rounds.num_for(components)
        logger.info("Loaded the %s in %.1f s, for %d video%s.", components, seconds, number, "s" * (number != 1))
        self.is_loading = False
        self._monitor.idle()
        with self._changed:
            self._rounds.loaded(components, seconds, time.monotonic())

    def returned(self, sample: Sample, *, is_decoded: bool) -> Sample:
        """Take back a sample that `take` has given, and return it with all of its units."""
        with self._changed:
            if sample.ended:
                self._rounds.end(sample.index)
            elif is_decoded or not sample.has_work(0):
                self._rounds.advance(sample.index)
            self._changed.notify_all()
        return replace(sample, boundaries=(0, sample.parameters.steps + 2))

    @property
    def size(self) -> int:
        """How many videos make a round."""
        return self._rounds.size

    @property
    def pace_s(self) -> float | None:
        """Seconds from one video to the next, in the long run: the videos of a round end together."""
        return self._rounds.pace_s

    def has_before(self, index: int) -> bool:
        """Return False: nothing interrupts a leg."""
        return False

    def close(self) -> None:
        """Have `take` return None when all is done."""
        with self._changed:
            self._rounds.close()
        super().close()

    def learn(self, video_s: float) -> None:
        """Learn how long a video like the last one takes on this rank."""
        with self._changed:
            self._rounds.video_s = video_s
            self._changed.notify_all()

    def outlook(self, seconds: Callable[[int, Leg], float]) -> dict[int, Outlook]:
        """Forecast the samples here, by index; see `Rounds.outlook`."""
        with self._changed:
            return self._rounds.outlook(seconds)
