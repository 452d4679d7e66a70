"""The loop of one rank: receive a sample, do its steps, pass it on. Knows no Redis, no files and no signals.

The world is told and asked through small protocols: where samples come from (rank 0), where frames go (the last rank),
who is told of progress and knows what is cancelled (every rank).
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.costs import CostBook, Shape
from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.message import Kind, Message, sample_body, sample_from
from svdq.pipeline.model import Frames, VideoModel
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.partition import Partitioner
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport import Receiver, Sender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A video to make, as rank 0 takes it in."""

    #: Id of the job that asks for it.
    job_id: str
    #: Its parameters, with `frames` filled in.
    parameters: VideoParameters
    #: The photo, exactly width x height; None where the model needs none.
    photo: Image | None
    #: What the source wants the sink to know, JSON; carried along unread.
    ticket: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a sample ended; travels from the last rank to rank 0 as JSON."""

    #: Id of the job.
    job_id: str
    #: The sample's parameters, stages and seconds, as `message.sample_body` writes them.
    body: Mapping[str, Any]
    #: What the sink made of it, for the job's result; empty when it failed or was cancelled.
    result: Mapping[str, Any]
    #: Why it failed, as a sentence.
    failure: str | None = None
    #: Whether it was cancelled.
    cancelled: bool = False


class Source(Protocol):
    """Where rank 0 gets its work."""

    def take(self) -> Request | None:
        """Wait for the next video to make; None when no more will come."""
        ...

    def nearly_free(self) -> None:
        """Rank 0 is in its last step (or has none): now is the time to have the next request ready."""
        ...

    def ended(self, report: Report) -> None:
        """Take note that a sample has ended. Called from another thread, in the order of the ends."""
        ...


class Sink(Protocol):
    """Where the last rank puts frames; writes beside the loop and pushes back when it cannot follow."""

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        """Take the frames of a sample, and report its end when they are safe."""
        ...

    def close(self) -> None:
        """Wait until everything delivered is written and reported."""
        ...


class Monitor(Protocol):
    """Who is told of progress and knows what is cancelled; both must be cheap, they stand in the step loop."""

    def step(self, sample: Sample, index: int) -> None:
        """Step `index` of a sample is about to be done here; index == steps means its decode."""
        ...

    def idle(self) -> None:
        """Nothing is being computed here."""
        ...

    def cancelled(self, job_id: str) -> bool:
        """Whether the user has cancelled a job."""
        ...


class Stage:
    """One rank at work, built from its parts; rank 0 has a source, the last rank a sink, inner ranks neither.

    A rank alone has both and no links.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        model: VideoModel,
        monitor: Monitor,
        tracer: Tracer,
        source: Source | None = None,
        sink: Sink | None = None,
        upstream: Receiver | None = None,
        downstream: Sender | None = None,
        returns: Sender | None = None,
        reports: Receiver | None = None,
    ) -> None:
        assert (source is None) == (upstream is not None)
        assert (sink is None) == (downstream is not None)
        self.rank = rank
        self._model = model
        self._monitor = monitor
        self._tracer = tracer
        self._source = source
        self._sink = sink
        self._upstream = upstream
        self._downstream = downstream
        self._returns = returns
        self._reports = reports
        self._partitioner = Partitioner(num_ranks)
        self.costs = CostBook(num_ranks, model.info.guess)
        self._warm: set[Shape] = set()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Receive, denoise, pass on, until no more samples come or `stop` is called."""
        follower = threading.Thread(target=self._follow_reports, name="reports", daemon=True)
        follower.start()
        while (sample := self._receive()) is not None:
            sample = self._denoise(sample)
            if not self._stopping.is_set():
                self._pass_on(sample)
        if not self._stopping.is_set():
            self._close()
            follower.join()

    def stop(self) -> None:
        """Have `run` return after the step that is being computed, leaving what is in flight; from any thread."""
        self._stopping.set()
        for link in (self._upstream, self._downstream):
            if link is not None:
                link.release()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def warm_up(self, parameters: VideoParameters) -> None:
        """Do once what the first sample of a shape would pay for (kernels chosen, memory reserved)."""
        shape = Shape.of(parameters)
        if shape not in self._warm:
            self._warm.add(shape)
            with self._tracer.span("warm-up"):
                self._model.warm_up(parameters)

    # Receiving: from the source on rank 0, from the neighbour elsewhere.

    def _receive(self) -> Sample | None:
        self._monitor.idle()
        if self._source is not None:
            request = self._source.take()
            return None if request is None or self.stopped else self._admit(request)
        assert self._upstream is not None
        while True:
            message = self._upstream.receive()
            if self.stopped:
                return None
            if message.kind is Kind.SAMPLE:
                return sample_from(message.body, message.tensors)
            if message.kind is Kind.CLOSE:
                return None
            if message.kind is Kind.WARM:
                # Passed on first, so that all ranks warm up at the same time.
                if self._downstream is not None:
                    self._downstream.send(message)
                self.warm_up(VideoParameters.model_validate(message.body))

    def _admit(self, request: Request) -> Sample:
        parameters = request.parameters
        shape = Shape.of(parameters)
        if shape not in self._warm and self._downstream is not None:
            self._downstream.send(Message(kind=Kind.WARM, body=parameters.model_dump(mode="json")))
        self._warm.add(shape)
        sample = Sample(
            job_id=request.job_id,
            parameters=parameters,
            boundaries=self._partitioner.split(0, parameters.steps, self.costs.estimate(shape)),
            step=0,
            ticket=request.ticket,
        )
        self._monitor.step(sample, 0)
        started = time.perf_counter()
        try:
            with self._tracer.span("encode", request.job_id):
                tensors = self._model.encode(request.photo, parameters)
        except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
            return sample.failed(_sentence(error, "while its photo was encoded"))
        return replace(sample, tensors=tensors, seconds={"encode": time.perf_counter() - started})

    # Denoising: this rank's range of steps.

    def _denoise(self, sample: Sample) -> Sample:
        stop = sample.boundaries[self.rank + 1]
        if sample.ended or sample.step >= stop:
            self._nearly_free()
            return sample
        started = time.perf_counter()
        index = first = sample.step
        try:
            with torch.inference_mode(), self._tracer.span(f"steps {first}-{stop - 1}", sample.job_id):
                denoiser = self._model.denoiser(sample.tensors, sample.parameters)
                latents = sample.tensors["latents"]
                for index in range(first, stop):
                    if self.stopped:
                        return sample
                    if self._monitor.cancelled(sample.job_id):
                        return replace(sample, step=index, cancelled=True, tensors={})
                    self._monitor.step(sample, index)
                    if index == stop - 1:
                        self._nearly_free()
                    latents = denoiser.step(latents, index)
                finite = _finite(latents)
        except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
            return sample.failed(_sentence(error, f"in step {index + 1} of {sample.parameters.steps}"))
        if not finite:
            return sample.failed(
                f"The latents became NaN or infinite in steps {first + 1} to {stop} of {sample.parameters.steps}; "
                "try another seed, or float32 in place of float16."
            )
        return replace(
            sample,
            step=stop,
            tensors={**sample.tensors, "latents": latents},
            stages=(*sample.stages, (self.rank, stop - first, time.perf_counter() - started)),
        )

    def _nearly_free(self) -> None:
        if self._source is not None:
            self._source.nearly_free()

    # Passing on: to the neighbour, or from the last rank to the sink.

    def _pass_on(self, sample: Sample) -> None:
        if self._downstream is not None:
            self._downstream.send(Message(kind=Kind.SAMPLE, body=sample_body(sample), tensors=sample.tensors))
            return
        assert self._sink is not None
        if not sample.ended and self._monitor.cancelled(sample.job_id):
            sample = replace(sample, cancelled=True, tensors={})
        if not sample.ended:
            sample, frames = self._decode(sample)
            if frames is not None:
                self._sink.deliver(sample, frames, self._report)
                return
        self._report(
            Report(
                job_id=sample.job_id,
                body=sample_body(sample),
                result={},
                failure=sample.failure,
                cancelled=sample.cancelled,
            )
        )

    def _decode(self, sample: Sample) -> tuple[Sample, Frames | None]:
        parameters = sample.parameters
        chunk_size = min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)
        self._monitor.step(sample, parameters.steps)
        started = time.perf_counter()
        while True:
            try:
                with torch.inference_mode(), self._tracer.span("decode", sample.job_id):
                    frames = self._model.decode(sample.tensors, parameters, chunk_size)
                break
            except torch.OutOfMemoryError as error:
                if chunk_size == 1:
                    return sample.failed(_sentence(error, "while one frame at a time was decoded")), None
                # The latents are still here: nothing is denoised twice.
                chunk_size = (chunk_size + 1) // 2
                logger.warning(
                    "Out of memory in the decode of %s; trying again with decode_chunk_size %d.",
                    sample.job_id,
                    chunk_size,
                )
                torch.cuda.empty_cache()
            except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
                return sample.failed(_sentence(error, "while its frames were decoded")), None
        return (
            replace(
                sample,
                parameters=parameters.model_copy(update={"decode_chunk_size": chunk_size}),
                tensors={},
                seconds={**sample.seconds, "decode": time.perf_counter() - started},
            ),
            frames,
        )

    def _report(self, report: Report) -> None:
        if self._returns is not None:
            self._returns.send(Message(kind=Kind.REPORT, body=asdict(report)))
        else:
            assert self._source is not None
            self._record(report)
            self._source.ended(report)

    def _close(self) -> None:
        if self._downstream is not None:
            self._downstream.close()
        if self._sink is not None:
            self._sink.close()
        if self._returns is not None:
            self._returns.close()

    def _record(self, report: Report) -> None:
        """Learn from a sample that has ended what its shape costs."""
        if report.failure is None and not report.cancelled:
            parameters = VideoParameters.model_validate(report.body["parameters"])
            self.costs.record(Shape.of(parameters), report.body["stages"], report.body["seconds"])

    def _follow_reports(self) -> None:
        """Take in the reports of the last rank until it closes. Runs in a thread of rank 0."""
        if self._reports is None:
            return
        assert self._source is not None
        while (message := self._reports.receive()).kind is Kind.REPORT:
            report = Report(**message.body)
            self._record(report)
            self._source.ended(report)


def _finite(latents: Tensor) -> bool:
    """Whether no latent is NaN or infinite: a sum is only if all terms are, and is ten times cheaper than a mask."""
    return math.isfinite(float(latents.sum(dtype=torch.float32)))


def _sentence(error: Exception, where: str) -> str:
    """Say why a sample failed. What we raise is a sentence already; the rest is logged with its traceback."""
    if isinstance(error, SampleError):
        return str(error)
    if isinstance(error, SvdqError):
        return f"{error} ({where})"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"Out of GPU memory {where}; try fewer frames, a smaller size or a smaller decode_chunk_size, "
            f"or a GPU with more memory. ({str(error).splitlines()[0][:300]})"
        )
    logger.exception("A sample failed %s", where, exc_info=error)
    return f"{type(error).__name__} {where}: {str(error)[:1000]}"
