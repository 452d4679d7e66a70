"""Rank 0's side of the stage loop: makes samples of requests, and learns from reports what they cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from svdq.pipeline.costs import CostModel, Shape
from svdq.pipeline.failures import say_why
from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.protocols import Monitor, Planner, Report, Request, Source
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import Kind, Work
from svdq.pipeline.transport.transport import Arrival


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
    ) -> None:
        """Begin with the first index.

        Args:
            source: of requests.
            planner: decides who does what.
            costs: what videos cost, by their shape.
            num_ranks: K.
            model: with the encoder.
            monitor: receives progress.
            tracer: records spans.
            warm_up: has the other ranks warm up for a request with an index, if its shape is new.
        """
        self.source = source
        self._planner = planner
        self._costs = costs
        self._num_ranks = num_ranks
        self._model = model
        self._monitor = monitor
        self._tracer = tracer
        self._warm_up = warm_up
        #: Index of the next sample.
        self.next_index = 0

    def take_if_wanted(self) -> Request | None:
        """Return a request that is ready, if a rank could begin it while rank 0 is between two steps."""
        if not self._planner.wants_more():
            return None
        self.source.prefetch_next()
        return self.source.take_if_ready()

    def admit(self, request: Request) -> Sample:
        """Plan a sample, and encode its photo; a resumed one goes on with its tensors."""
        index, self.next_index = self.next_index, self.next_index + 1
        self._warm_up(request, index)
        parameters, resume = request.parameters, request.resume
        first_step = resume.step if resume is not None else 0
        decoders = range(self._num_ranks) if request.decoders is None else request.decoders
        costs = self._costs.estimate(Shape.of(parameters))
        plan = self._planner.assign(index, first_step, parameters.steps, costs, decoders)
        assert plan.boundaries[0] == first_step, plan
        assert plan.boundaries[-1] == parameters.steps, plan
        assert plan.decoder in decoders, plan
        if resume is not None:
            # What it took before may have been on another kind of GPU.
            sample = replace(
                resume,
                index=index,
                boundaries=plan.boundaries,
                decoder=plan.decoder,
                metadata=request.metadata,
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
            metadata=request.metadata,
            chunk_chosen=request.chunk_chosen,
        )
        self._monitor.step(sample, 0)
        started = time.perf_counter()
        try:
            with self._tracer.span("encode", request.job_id):
                tensors = self._model.encode(request.photo, parameters)
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return sample.failed(say_why(error, "while its photo was encoded"))
        seconds = time.perf_counter() - started
        self.on_work([Work(0, index, "encode", seconds)])
        return replace(sample, tensors=tensors, seconds={"encode": seconds})

    def on_work(self, work: Sequence[Work]) -> None:
        """Handle finished work of any rank."""
        for each in work:
            self._planner.on_work(each.rank, each.index, each.kind, each.seconds)

    def on_report(self, report: Report) -> None:
        """Handle the end of a sample: learn what its shape costs."""
        self._planner.on_ended(report.body["index"])
        if report.failure is None and not report.canceled:
            parameters = VideoParameters.model_validate(report.body["parameters"])
            self._costs.record(Shape.of(parameters), report.body["stages"], report.body["seconds"])
        self.source.ended(report)

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
