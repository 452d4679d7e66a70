"""The loop of one rank: receive a sample, do its steps, pass it on. Does not import Redis or RQ.

The world is told and asked through the protocols in `protocols.py`.
"""

import gc
import logging
import threading
import time
from dataclasses import replace

import torch
from torch import Tensor

from svdq.pipeline.costs import CostModel, Shape
from svdq.pipeline.decoding import Decoder
from svdq.pipeline.failures import all_finite, say_where_it_broke, say_why
from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.partition import Partitioner
from svdq.pipeline.protocols import Checkpointer, Monitor, NoCheckpointer, Report, Request, Sink, Source
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import Kind, Message, sample_body
from svdq.pipeline.transport.transport import Receiver, Sender

logger = logging.getLogger(__name__)

#: Seconds of denoising after which a sample is saved between two steps, besides at every hand-over.
KEEP_EVERY_S = 30.0


class Stage:
    """One rank, composed of its parts; rank 0 has a source, the last rank a sink, inner ranks neither.

    A single rank has both and no links.
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
        checkpointer: Checkpointer | None = None,
        keep_every_s: float = KEEP_EVERY_S,
    ) -> None:
        assert (source is None) == (upstream is not None)
        assert (sink is None) == (downstream is not None)
        self.rank = rank
        self._model = model
        self._decoder = Decoder(model)
        self._monitor = monitor
        self._tracer = tracer
        self._source = source
        self._sink = sink
        self._upstream = upstream
        self._downstream = downstream
        self._returns = returns
        self._reports = reports
        self._checkpointer = checkpointer or NoCheckpointer()
        self._keep_every_s = keep_every_s
        self._partitioner = Partitioner(num_ranks)
        self.costs = CostModel(num_ranks, model.info.prior)
        self._warm: set[Shape] = set()
        self._stopping = threading.Event()

    @torch.inference_mode()
    def run(self) -> None:
        """Receive, denoise, pass on, until no more samples come or `stop` is called."""
        # Freeze existing objects, so that no garbage collection traverses all of torch during a stage.
        gc.collect()
        gc.freeze()
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
        """Make `run` return after the current step, keeping samples in flight; may be called from any thread."""
        self._stopping.set()
        # All of them: after the last sample, rank 0 may wait for reports, and any rank for its last message to be sent.
        for link in (self._upstream, self._downstream, self._returns, self._reports):
            if link is not None:
                link.release()
        if self._sink is not None:
            self._sink.release()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def warm_up(self, parameters: VideoParameters) -> None:
        """Do the initialization of a shape's first sample in advance (kernels chosen, memory reserved).

        A failure here fails no rank: samples try smaller chunks, or report the error.
        """
        shape = Shape.of(parameters)
        if shape in self._warm:
            return
        self._warm.add(shape)
        with self._tracer.span("warm-up"):
            try:
                self._model.warm_up(parameters)
            except Exception as error:  # noqa: BLE001 - torch raises many types
                shape_text = f"{shape.width}x{shape.height}x{shape.frames}"
                logger.warning("%s", say_why(error, f"while this rank warmed up for {shape_text}"))

    def warm_up_group(self, parameters: VideoParameters) -> None:
        """Warm up on all ranks at the same time; on rank 0, before `run`.

        Args:
            parameters: of the shape, with the planned decode_chunk_size.
        """
        self._announce(parameters)
        self.warm_up(parameters)

    def _announce(self, parameters: VideoParameters, job_id: str = "") -> None:
        """Make the following ranks warm up for a shape; `job_id` is the job with this shape, if there is one."""
        if self._downstream is not None:
            body = {"job_id": job_id, "parameters": parameters.model_dump(mode="json")}
            self._downstream.send(Message(kind=Kind.WARM, body=body))

    # Receiving: from the source on rank 0, from the neighbour elsewhere.

    def _receive(self) -> Sample | None:
        if self._source is not None:
            request = self._source.take()
            return None if request is None or self.stopped else self._admit(request)
        assert self._upstream is not None
        while True:
            message = self._upstream.receive()
            if self.stopped:
                return None
            if message.sample is not None:
                return message.sample
            if message.kind is Kind.CLOSE:
                return None
            if message.kind is Kind.WARM:
                # Passed on first, so that all ranks warm up at the same time.
                if self._downstream is not None:
                    self._downstream.send(message)
                parameters = VideoParameters.model_validate(message.body["parameters"])
                if job_id := message.body["job_id"]:
                    # If the warm-up kills ranks, this job is set aside.
                    self._monitor.warm_up(Sample(job_id=job_id, parameters=parameters, boundaries=(), step=0))
                self.warm_up(parameters)
                self._monitor.idle()

    def _admit(self, request: Request) -> Sample:
        parameters = request.parameters
        shape = Shape.of(parameters)
        if shape not in self._warm:
            self._announce(parameters, request.job_id)
        self._warm.add(shape)
        resume = request.resume
        first_step = resume.step if resume is not None else 0
        # The remaining steps are spread over all ranks, of a whole video or the rest of one.
        boundaries = self._partitioner.split(first_step, parameters.steps, self.costs.estimate(shape))
        if resume is not None:
            # What it took before may have been on another kind of GPU.
            sample = replace(resume, boundaries=boundaries, metadata=request.metadata, memory={}, ran_out=False)
            self._monitor.step(sample, first_step)
            return sample
        sample = Sample(
            job_id=request.job_id,
            parameters=parameters,
            boundaries=boundaries,
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
        return replace(sample, tensors=tensors, seconds={"encode": time.perf_counter() - started})

    # Denoising: this rank's range of steps.

    def _denoise(self, sample: Sample) -> Sample:
        stop = sample.boundaries[self.rank + 1]
        if sample.ended or sample.step >= stop:
            self._prefetch_next()
            return sample
        started = time.perf_counter()
        keep_at = started + self._keep_every_s
        index = first = sample.step
        try:
            with self._tracer.span(f"steps {first}-{stop - 1}", sample.job_id):
                denoiser = self._model.denoiser(sample.tensors, sample.parameters)
                latents = sample.tensors["latents"]
                for index in range(first, stop):
                    if self.stopped:
                        self._checkpointer.save(self._advanced(sample, index, latents, time.perf_counter() - started))
                        return sample
                    if self._monitor.canceled(sample.job_id):
                        return replace(sample, step=index, canceled=True, tensors={})
                    if time.perf_counter() >= keep_at:
                        keep_at += self._keep_every_s
                        # A copy: the next step may compute in place.
                        seconds = time.perf_counter() - started
                        self._checkpointer.save(self._advanced(sample, index, latents.clone(), seconds))
                    self._monitor.step(sample, index)
                    if index == stop - 1:
                        self._prefetch_next()
                    latents = denoiser.step(latents, index)
                if not all_finite(latents):
                    return sample.failed(say_where_it_broke(self._model, sample, stop, self._monitor))
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return sample.failed(say_why(error, f"in step {index + 1} of {sample.parameters.steps}"))
        sample = self._advanced(sample, stop, latents, time.perf_counter() - started)
        self._checkpointer.save(sample)
        return sample

    def _advanced(self, sample: Sample, step: int, latents: Tensor, seconds: float) -> Sample:
        """Return the sample before `step`, which this rank has reached in `seconds`."""
        if step == sample.step:
            return sample
        return replace(
            sample,
            step=step,
            tensors={**sample.tensors, "latents": latents},
            stages=(*sample.stages, (self.rank, step - sample.step, seconds)),
        )

    def _prefetch_next(self) -> None:
        if self._source is not None:
            self._source.prefetch_next()

    # Passing on: to the neighbour, or from the last rank to the sink.

    def _pass_on(self, sample: Sample) -> None:
        if self._downstream is not None:
            self._monitor.idle()
            sample = sample.taking(self._model.memory(sample.parameters))
            self._downstream.send(Message(kind=Kind.SAMPLE, body=sample_body(sample), tensors=sample.tensors))
            return
        assert self._sink is not None
        if not sample.ended and self._monitor.canceled(sample.job_id):
            sample = replace(sample, canceled=True, tensors={})
        if not sample.ended:
            self._monitor.step(sample, sample.parameters.steps)
            with self._tracer.span("decode", sample.job_id):
                sample, frames = self._decoder.decode(sample)
            sample = sample.taking(self._model.memory(sample.parameters))
            self._monitor.idle()
            if frames is not None:
                self._sink.deliver(sample, frames, self._report)
                return
        self._monitor.idle()
        self._report(
            Report(
                job_id=sample.job_id,
                body=sample_body(sample),
                result={},
                failure=sample.failure,
                canceled=sample.canceled,
            )
        )

    def _report(self, report: Report) -> None:
        if self._returns is not None:
            self._returns.send(Message(kind=Kind.REPORT, body=vars(report)))
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
        if report.failure is None and not report.canceled:
            parameters = VideoParameters.model_validate(report.body["parameters"])
            self.costs.record(Shape.of(parameters), report.body["stages"], report.body["seconds"])

    def _follow_reports(self) -> None:
        """Process the reports of the last rank until it closes. Runs in a thread of rank 0."""
        if self._reports is None:
            return
        assert self._source is not None
        while (message := self._reports.receive()).kind is Kind.REPORT:
            report = Report(**message.body)
            self._record(report)
            self._source.ended(report)
