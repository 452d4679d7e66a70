"""Rank 0's side of the loop: makes samples of requests when a rank can begin them, and measures their costs."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from svdq.pipeline.loop.inbox import RoundsInbox
from svdq.pipeline.loop.protocols import Report, Request, Source
from svdq.pipeline.loop.sample import PHOTOS, Sample
from svdq.pipeline.models.compute.failures import describe_failure
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.binding import Bounds, Components, Segment, bounds_of, step_costs
from svdq.pipeline.planning.blocks import Row
from svdq.pipeline.planning.costs import CostModel, Shape
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.planning.rounds import Leg, Outlook, legs_of
from svdq.pipeline.transport.message import Kind, Message, Work

LOOK_S = 0.005  # seconds between two looks at the plan, at least: with very short steps there is news all the time


@dataclass(frozen=True, kw_only=True)
class _Admitted:
    """The facts of a sample in flight that the plan needs at its end."""

    job_id: str
    shape: Shape
    steps: Sequence[float]  # costs of its steps, relative to each other


class Admission:
    """Admits videos in the order in which the source supplies them, in its own thread."""

    def __init__(
        self,
        source: Source,
        planner: Planner,
        costs: CostModel,
        model: VideoModel,
        components: Sequence[Components],
        begin: Callable[[Sample], None],
        inbox: RoundsInbox | None = None,
    ) -> None:
        """Begin with the first index; `components` are what each rank has, and `begin` gets each admitted sample.

        With the `inbox` of the only rank, its rounds decide when a sample is admitted.
        """
        self._source = source
        self._planner = planner
        self._costs = costs
        self._model = model
        self._components = components
        self._begin = begin
        self._inbox = inbox
        self._num_admitted = 0
        #: Why the thread ended early.
        self.error: BaseException | None = None
        #: The threads that admit samples and that receive reports use the planner and the costs.
        self._lock = threading.Lock()
        #: Set when the planner has learned something, or the rank stops.
        self._news = threading.Event()
        self._released = False
        self._in_flight: dict[int, _Admitted] = {}

    def start(self, on_end: Callable[[], None]) -> None:
        """Start to admit videos; `on_end` is called after the last one."""

        def run() -> None:
            try:
                while self._wait_until_wanted() and (request := self._source.take()) is not None:
                    if self._released:
                        break
                    self._begin(self.admit(request))
            except BaseException as error:  # noqa: BLE001 - raised by the stage
                self.error = error
            on_end()

        threading.Thread(target=run, name="admission", daemon=True).start()

    def release(self) -> None:
        """Admit nothing more; from any thread."""
        self._released = True
        self._news.set()

    def _wait_until_wanted(self) -> bool:
        """Wait until a rank can begin another sample soon; return False after `release`."""
        if self._inbox is not None:
            return self._inbox.wait_until_wanted()
        while not self._released:
            self._news.clear()
            with self._lock:
                wait_s = self._planner.wait_s(time.monotonic()) - self._source.lead_s
            if wait_s <= 0:
                return True
            self._news.wait(wait_s)
            time.sleep(LOOK_S)
        return False

    def admit(self, request: Request) -> Sample:
        """Make a sample of a request, with its plan; a resumed one goes on with its tensors."""
        segments = self._model.segments(request.parameters)
        sample = self._sample_of(request, segments)
        if self._inbox is not None and not sample.ended:
            legs = legs_of(segments, max(sample.step + 1, 0), has_text=sample.step < -1)
            self._inbox.expect(sample.index, legs, request)
        return sample

    @torch.inference_mode()
    def _sample_of(self, request: Request, segments: Sequence[Segment]) -> Sample:
        index, self._num_admitted = self._num_admitted, self._num_admitted + 1
        parameters, resume = request.parameters, request.resume
        steps = step_costs(segments)
        shape = Shape.of(parameters)
        with self._lock:
            boundaries = self._planner.admit(
                index,
                Row.of(self._costs.estimate(shape), steps),
                shape=(shape, *segments),
                num_waiting=request.num_waiting,
                now=time.monotonic(),
                first_unit=resume.step + 1 if resume is not None else 0,
                bounds=self._bounds(request, segments),
            )
            self._in_flight[index] = _Admitted(job_id=request.job_id, shape=shape, steps=steps)
        costs = () if set(steps) == {1.0} else tuple(steps)
        sample = Sample(
            job_id=request.job_id,
            index=index,
            parameters=parameters,
            boundaries=boundaries,
            step_costs=costs,
            step=-1,
            job=request.job,
            chunk_chosen=request.chunk_chosen,
        )
        if resume is not None:
            # The memory that it took before may have been on another kind of GPU.
            return replace(resume, index=index, boundaries=boundaries, step_costs=costs, job=request.job, memory={})
        try:
            embedded = self._model.embed(parameters)
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return sample.failed(describe_failure(error, "while its prompt was encoded"))
        tensors = dict(embedded or {})
        for name, photo in zip(PHOTOS, (request.photo, request.last_photo), strict=True):
            if photo is not None:
                tensors[name] = torch.from_numpy(np.array(photo))
        return replace(sample, tensors=tensors, step=-1 if embedded is not None else -2)

    def _bounds(self, request: Request, segments: Sequence[Segment]) -> list[Bounds] | None:
        """Return the units that each rank may do; None if every rank may do all."""
        every = range(len(self._components))
        encoders = every if request.encoders is None else request.encoders
        decoders = every if request.decoders is None else request.decoders
        bounds = bounds_of(segments, self._components, encoders, decoders)
        return bounds if set(bounds) != {(0, request.parameters.steps + 2)} else None

    def on_work(self, work: Sequence[Work]) -> None:
        """Record the costs of finished work of any rank."""
        with self._lock:
            for each in work:
                if (admitted := self._in_flight.get(each.sample)) is None:
                    continue
                if each.stop == 1:
                    self._costs.record(admitted.shape, each.rank, "encode", each.seconds)
                elif each.start > len(admitted.steps):
                    if each.upscale_s:
                        self._costs.record(admitted.shape, each.rank, "upscale", each.upscale_s)
                    if each.seconds > each.upscale_s:  # else its frames were there
                        self._costs.record(admitted.shape, each.rank, "decode", each.seconds - each.upscale_s)
                else:
                    step_s, cost = each.seconds / (each.stop - each.start), admitted.steps[each.start - 1]
                    self._costs.record_step(admitted.shape, each.rank, step_s, cost)
                self._planner.finished(each.sample, each.rank, each.stop, time.monotonic())
                if self._inbox is not None and self._costs.is_measured(admitted.shape):
                    self._inbox.learn(self._row(admitted).upto_s[-1])
        self._news.set()

    def _row(self, admitted: _Admitted) -> Row:
        return Row.of(self._costs.estimate(admitted.shape), admitted.steps)

    def outlook(self) -> dict[str, Outlook]:
        """Forecast the videos of a rank that works in rounds, by job, without times before these are measured."""
        if self._inbox is None:
            return {}
        found = self._inbox.outlook(self._seconds)
        with self._lock:
            admitted = dict(self._in_flight)
            if not all(self._costs.is_measured(each.shape) for each in admitted.values()):
                found = {index: outlook.model_copy(update={"eta_s": None}) for index, outlook in found.items()}
        return {admitted[index].job_id: outlook for index, outlook in found.items() if index in admitted}

    def _seconds(self, index: int, leg: Leg) -> float:
        admitted = self._in_flight.get(index)
        return 0.0 if admitted is None else self._row(admitted).seconds(0, leg.start, leg.stop)

    def on_report(self, report: Report) -> None:
        """Handle the end of a sample."""
        with self._lock:
            self._planner.ended(report.body["index"])
            self._in_flight.pop(report.body["index"], None)
        self._news.set()
        self._source.ended(report)

    def handle(self, message: Message) -> None:
        """Handle a message from the last rank, in the thread that receives it; raises ValueError if it is no report."""
        self.on_work(message.work)
        if message.kind is Kind.REPORT:
            self.on_report(Report(**message.body))
        elif message.kind not in (Kind.WORK, Kind.CLOSE):
            raise ValueError(f"a {message.kind.value} message does not go to rank 0")
