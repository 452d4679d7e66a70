"""The loop of one rank: take a sample, do its steps or its decode, pass it on. Does not import Redis or RQ.

`protocols.py` connects it to its surroundings.
"""

import gc
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from svdq.pipeline.loop.admission import Admission
from svdq.pipeline.loop.inbox import Inbox, Router
from svdq.pipeline.loop.protocols import Checkpointer, Monitor, Report, Request, Sink, Source
from svdq.pipeline.loop.sample import Sample, sample_body
from svdq.pipeline.loop.work import KEEP_EVERY_S, Decoder, StepLoop, Warmup
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.planning.costs import CostModel
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import OnLost, Receiver, Sender
from svdq.pipeline.transport.message import Kind, Message, Work, on_host
from svdq.pipeline.transport.topology import Links, Topology
from svdq.pipeline.video_parameters import VideoParameters

logger = logging.getLogger(__name__)


class Stage:
    """One rank, composed of its parts; rank 0 has a source, the last rank a sink, inner ranks neither.

    A single rank has both and no links.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        links: Links,
        on_lost: OnLost,
        model: VideoModel,
        device: torch.device | None = None,
        monitor: Monitor,
        tracer: Tracer,
        source: Source | None = None,
        sink: Sink | None = None,
        checkpointer: Checkpointer | None = None,
        planner: Planner | None = None,
        components: Sequence[Components] = (),
        keep_every_s: float = KEEP_EVERY_S,
    ) -> None:
        """Connect a rank to its surroundings.

        `on_lost` is called from a thread when a neighbor is gone; it should end the process, since the group is broken.
        On rank 0, `components` are the denoising components of each rank; none: all ranks have all.
        """
        assert (source is not None) == topology.first
        assert (sink is not None) == topology.last
        rank, num_ranks = topology.rank, topology.num_ranks
        self.rank = rank
        self._model = model
        self._device = device or torch.device("cpu")
        self._decoder = Decoder(model)
        self._monitor = monitor
        self._tracer = tracer
        self._sink = sink
        #: From the rank before, or on rank 0 from the last rank; None on a single rank.
        self._incoming = Receiver(links.incoming, (rank - 1) % num_ranks, on_lost) if links.incoming else None
        #: To the next rank, or from the last rank to rank 0; None on a single rank.
        self._outgoing = Sender(links.outgoing, (rank + 1) % num_ranks, on_lost) if links.outgoing else None
        self._downstream = None if topology.last else self._outgoing
        self._inbox = Inbox()
        self._warmup = Warmup(model, tracer, self._downstream)
        self.costs = CostModel(num_ranks, model.info.prior)
        self._admission: Admission | None = None
        if source is not None:
            self._admission = Admission(
                source=source,
                planner=planner or Planner(num_ranks),
                costs=self.costs,
                num_ranks=num_ranks,
                model=model,
                monitor=monitor,
                tracer=tracer,
                warm_up=self._warmup.announce_new,
                components=components,
            )
        self._stopping = threading.Event()
        self._steps = StepLoop(
            rank=rank,
            model=model,
            monitor=monitor,
            tracer=tracer,
            checkpointer=checkpointer or Checkpointer(),
            stopping=self._stopping,
            before_step=self._before_step,
            keep_every_s=keep_every_s,
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Receive, denoise, decode, pass on, until no more samples come or `stop` is called."""
        # Freeze existing objects, so that no garbage collection traverses all of torch during a stage.
        gc.collect()
        gc.freeze()
        if self._incoming is not None:
            assert self._outgoing is not None
            router = Router(
                rank=self.rank, inbox=self._inbox, outgoing=self._outgoing, sink=self._sink, report=self._report
            )
            self._incoming.start(router.handle if self._admission is None else self._admission.handle)
        while (sample := self._next()) is not None:
            num_stages = len(sample.stages)
            sample = self._steps.run(sample)
            if self.stopped:
                break
            for _, _, seconds in sample.stages[num_stages:]:
                self._note_work(sample, "steps", seconds)
            self._pass_on(sample)
        if not self.stopped:
            self._close()

    def stop(self) -> None:
        """Make `run` return after the current step, keeping samples in flight; may be called from any thread."""
        self._stopping.set()
        self._inbox.release()
        if self._admission is not None:
            self._admission.release()
        # All of them: after the last sample, rank 0 may wait for reports, and any rank for its last message to be sent.
        for link in (self._incoming, self._outgoing):
            if link is not None:
                link.release()
        if self._sink is not None:
            self._sink.release()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def warm_up(self, parameters: VideoParameters) -> None:
        """Do the initialization of a shape's first sample in advance, on this rank."""
        self._warmup.run(parameters)

    def warm_up_group(self, parameters: VideoParameters) -> None:
        """Warm up on all ranks at the same time; on rank 0, before `run`, with the planned decode_chunk_size."""
        self._warmup.announce(parameters)
        self._warmup.run(parameters)

    # Taking: the waiting sample of the lowest index; on rank 0 the next video, when none waits.

    def _next(self) -> Sample | None:
        while not self.stopped:
            if self._admission is not None and not self._inbox:
                request = self._admission.take()
                if request is None or self.stopped:
                    return None
                self._admit(request)
                continue
            work = self._inbox.take()
            if work is None or isinstance(work, Sample):
                return self._on_device(work)
            if work.job_id:
                # If the warm-up kills ranks, this job is set aside.
                sample = Sample(job_id=work.job_id, parameters=work.parameters, boundaries=(), step=0)
                self._monitor.warm_up(sample)
            self._warmup.run(work.parameters)
            self._monitor.idle()
        return None

    def _admit(self, request: Request) -> None:
        """Admit a video, and pass it on if this rank has no work of it."""
        assert self._admission is not None
        sample = self._admission.admit(request)
        if sample.has_work(self.rank):
            self._inbox.put(sample)
        elif not self.stopped:
            self._pass_on(sample)

    def _on_device(self, sample: Sample | None) -> Sample | None:
        if sample is None or self._device.type == "cpu":
            return sample
        tensors = {name: tensor.to(self._device, non_blocking=True) for name, tensor in sample.tensors.items()}
        return replace(sample, tensors=tensors)

    def _before_step(self, is_last: bool, *, decodes: bool = False) -> float:
        """On rank 0, admit videos that other ranks could begin now; return the seconds that this took."""
        # A single rank has nobody to admit videos for; before its last step it prepares the next one.
        if self._admission is None or not (self._downstream or is_last):
            return 0.0
        started = time.perf_counter()
        is_last = is_last and not self._inbox
        while not self.stopped:
            request = self._admission.take_if_wanted(is_last=is_last, decodes=decodes)
            if request is None:
                break
            self._monitor.idle()  # the steps of the present sample are paused
            self._admit(request)
        return time.perf_counter() - started

    # Passing on: samples and frames to the next rank, frames from the last rank to the sink.

    def _pass_on(self, sample: Sample) -> None:
        if not sample.ended and sample.decoder == self.rank and sample.step == sample.parameters.steps:
            sample, frames = self._decode(sample)
            if frames is not None:
                self._deliver(sample, frames)
                return
        self._monitor.idle()
        if self._downstream is not None:
            sample = sample.taking(self._model.memory(sample.parameters))
            self._downstream.send(Message(kind=Kind.SAMPLE, body=sample_body(sample), tensors=sample.tensors))
        else:
            self._report(Report.of(sample))

    def _decode(self, sample: Sample) -> tuple[Sample, Tensor | None]:
        """Decode on this rank; return the frames, or the sample as failed or canceled."""
        if self._monitor.canceled(sample.job_id):
            return replace(sample, canceled=True, tensors={}), None
        if self._outgoing is not None:
            self._outgoing.send_work()
        self._before_step(is_last=True, decodes=True)
        self._monitor.step(sample, sample.parameters.steps)
        with self._tracer.span("decode", sample.job_id):
            sample, frames = self._decoder.decode(sample)
        sample = sample.taking(self._model.memory(sample.parameters))
        if frames is not None:
            self._note_work(sample, "decode", sample.seconds["decode"])
        return sample, frames

    def _deliver(self, sample: Sample, frames: Tensor) -> None:
        """Give frames (F, H, W, 3) to the sink, or send them to the rank that has it."""
        self._monitor.idle()
        if self._downstream is not None:
            # The link's thread copies them to the host and sends them.
            self._downstream.send(Message(kind=Kind.FRAMES, body=sample_body(sample), tensors={"frames": frames}))
            return
        assert self._sink is not None
        if self._outgoing is not None:
            self._outgoing.send_work()
        self._sink.deliver(sample, on_host({"frames": frames})["frames"].numpy(), self._report)

    def _note_work(self, sample: Sample, kind: str, seconds: float) -> None:
        work = [Work(self.rank, sample.index, kind, seconds)]
        if self._admission is not None:
            self._admission.on_work(work)
        elif self._outgoing is not None:
            self._outgoing.note(work)

    def _report(self, report: Report) -> None:
        """Report the end of a sample, on the last rank; from any thread."""
        if self._outgoing is not None:
            self._outgoing.send(Message(kind=Kind.REPORT, body=vars(report)))
        else:
            assert self._admission is not None
            self._admission.on_report(report)

    def _close(self) -> None:
        """Close the links after everything that was sent; on rank 0 wait for the last report."""
        if self._sink is not None:
            self._sink.close()
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None and self._admission is not None:
            self._incoming.join()
