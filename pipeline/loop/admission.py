"""Rank 0's side of the stage loop: makes samples of requests, and learns from reports what they cost."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from svdq.pipeline.loop.protocols import Monitor, Report, Request, Source
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.failures import describe_failure, with_second_try
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.binding import Components, bounds_of
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import CostModel, Shape
from svdq.pipeline.planning.planner import Assignment, Planner
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import Arrival
from svdq.pipeline.transport.message import Kind, Work

logger = logging.getLogger(__name__)


class Admission:
    """Admits videos, in the order in which the source supplies them."""

    def __init__(
        self,
        *,
        source: Source,
        planner: Planner,
        costs: CostModel,
        num_ranks: int,
        model: VideoModel,
        monitor: Monitor,
        tracer: Tracer,
        warm_up: Callable[[Request, int], None],
        components: Sequence[Components] = (),
    ) -> None:
        """Begin with the first index.

        `components` are those of each rank; none: all ranks have all. `warm_up` has the other ranks warm up for a
        request with an index, if its shape is new.
        """
        self.source = source
        self._planner = planner
        self._costs = costs
        self._num_ranks = num_ranks
        self._model = model
        self._monitor = monitor
        self._tracer = tracer
        self._warm_up = warm_up
        self._components = components if any(held is not None for held in components) else ()
        #: Index of the next sample.
        self.next_index = 0
        #: The stage loop and the thread that receives reports use the planner and the costs.
        self._lock = threading.Lock()
        #: Set when the planner has learned something, or the rank stops.
        self._news = threading.Event()
        self._released = False
        #: Shapes and numbers of steps of the videos for which useless ranks were looked for.
        self._judged: set[tuple[Shape, int]] = set()
        #: Shape and assignment of the samples in flight, by index.
        self._in_flight: dict[int, tuple[Shape, Assignment]] = {}

    def take(self) -> Request | None:
        """Wait for the next request while rank 0 has nothing to do; None when no more will come, or after `release`.

        Where ranks are bound to later steps, it also waits until these have room for another sample.
        """
        while self._components:
            self._news.clear()
            with self._lock:
                wait_s = self._planner.wait_for_room_s(time.monotonic())
            if wait_s <= 0 or self._released:
                break
            self._news.wait(wait_s)
        return None if self._released else self.source.take()

    def release(self) -> None:
        """Unblock `take`; from any thread."""
        self._released = True
        self._news.set()

    def take_if_wanted(self, *, is_last: bool, decodes: bool) -> Request | None:
        """Return a request that is ready, if another rank is about to be free; between two pieces of rank 0's work.

        `is_last` says whether rank 0 itself will be free after the next piece, `decodes` whether that is a decode.
        """
        with self._lock:
            wait_s = self._planner.wait_for_others_s(time.monotonic(), decodes=decodes)
            step_s = self._planner.step_s
        if is_last or wait_s <= step_s:
            self.source.prefetch_next()
        return self.source.take_if_ready() if wait_s <= 0 else None

    def admit(self, request: Request) -> Sample:
        """Plan a sample, and encode its photo; a resumed one goes on with its tensors."""
        index, self.next_index = self.next_index, self.next_index + 1
        self._warm_up(request, index)
        parameters, resume = request.parameters, request.resume
        first_step = resume.step if resume is not None else 0
        decoders = range(self._num_ranks) if request.decoders is None else request.decoders
        shape = Shape.of(parameters)
        bounds = bounds_of(self._model.segments(parameters), self._components) if self._components else None
        with self._lock:
            plan = self._planner.admit(
                index,
                first_step,
                parameters.steps,
                self._costs.estimate(shape),
                decoders,
                shape=shape,
                encoded=resume is not None,
                num_waiting=request.num_waiting,
                now=time.monotonic(),
                bounds=bounds,
            )
            self._in_flight[index] = shape, plan
        if resume is not None:
            # What it took before may have been on another kind of GPU.
            sample = replace(
                resume,
                index=index,
                boundaries=plan.boundaries,
                decoder=plan.decoder,
                job=request.job,
                memory={},
                ran_out=False,
            )
            self._monitor.step(sample, first_step)
            return sample
        sample = Sample(
            job_id=request.job_id,
            index=index,
            parameters=parameters,
            boundaries=plan.boundaries,
            decoder=plan.decoder,
            step=0,
            job=request.job,
            chunk_chosen=request.chunk_chosen,
        )
        self._monitor.step(sample, 0)
        started = time.perf_counter()
        try:
            with self._tracer.span("encode", request.job_id):
                encode = partial(self._model.encode, request.photo, parameters)
                tensors = with_second_try(encode, f"the encode of {request.job_id}")
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return sample.failed(describe_failure(error, "while its photo was encoded"))
        seconds = time.perf_counter() - started
        self.on_work([Work(0, index, "encode", seconds)])
        return replace(sample, tensors=tensors, seconds={"encode": seconds})

    def on_work(self, work: Sequence[Work]) -> None:
        """Handle finished work of any rank: learn what its shape costs."""
        with self._lock:
            for each in work:
                if (in_flight := self._in_flight.get(each.sample)) is None or not 0 <= each.rank < self._num_ranks:
                    continue
                shape, plan = in_flight
                num_steps = plan.boundaries[each.rank + 1] - plan.boundaries[each.rank]
                self._costs.record(shape, each.rank, each.kind, num_steps, each.seconds)
                self._planner.finished(each.sample, each.rank, each.kind, time.monotonic())
        self._news.set()

    def on_report(self, report: Report) -> None:
        """Handle the end of a sample."""
        with self._lock:
            self._planner.ended(report.body["index"])
            ended = self._in_flight.pop(report.body["index"], None)
            if ended is not None and report.failure is None and not report.canceled:
                self._warn_of_useless_ranks(ended[0], ended[1].boundaries[-1])
        self._news.set()
        self.source.ended(report)

    def _warn_of_useless_ranks(self, shape: Shape, steps: int) -> None:
        """Warn once if rank 0 encodes so long that it cannot supply all ranks, as with few, cheap steps."""
        notice = self._model.info.notice
        # Only int8 weights leave a model with a notice one whose pace matters.
        if (shape, steps) in self._judged or (notice and not notice.startswith("approximate")):
            return
        self._judged.add((shape, steps))
        costs = self._costs.estimate(shape)
        useful = VideoCosts(steps=steps, costs=costs).largest_useful
        if useful < self._num_ranks:
            logger.warning(
                "Videos of %d steps are no faster on %d ranks than on %d: rank 0 encodes each for %.2g s, and the "
                "others wait for it. `svdq worker --groups %d` would use all of them.",
                steps, self._num_ranks, useful, costs.encode_s, math.ceil(self._num_ranks / useful),
            )  # fmt: skip

    def handle(self, arrival: Arrival) -> None:
        """Handle what the last rank reports. Runs in the thread that receives it.

        Raises:
            ValueError: it is not a report.
        """
        message = arrival.message
        self.on_work(message.work)
        if message.kind is Kind.REPORT:
            self.on_report(Report(**message.body))
        elif message.kind not in (Kind.WORK, Kind.CLOSE):
            raise ValueError(f"a {message.kind.value} message does not go to rank 0")
