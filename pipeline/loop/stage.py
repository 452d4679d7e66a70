"""The loop of one rank, without Redis and RQ: receive a sample, do its units, pass it on; see `protocols.py`."""

import gc
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from svdq.pipeline.loop.admission import Admission
from svdq.pipeline.loop.inbox import Inbox, RoundsInbox
from svdq.pipeline.loop.outlet import Outlet
from svdq.pipeline.loop.protocols import Report, Surroundings
from svdq.pipeline.loop.sample import Sample, sample_from
from svdq.pipeline.loop.work import KEEP_EVERY_S, UnitLoop, Warmup
from svdq.pipeline.models.upscaler import Upscaler
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.planning.costs import CostModel
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.planning.rounds import Outlook
from svdq.pipeline.transport.links import Receiver
from svdq.pipeline.transport.message import Kind, Message
from svdq.pipeline.transport.topology import Links, Topology
from svdq.pipeline.video_parameters import VideoParameters


class Stage:
    """One rank: inbox, units and outlet, and on rank 0 the admission; a single rank has no links."""

    def __init__(
        self,
        topology: Topology,
        links: Links,
        model: VideoModel,
        surroundings: Surroundings,
        *,
        device: torch.device | None = None,
        components: Sequence[Components] = (),
        planner: Planner | None = None,
        keep_every_s: float = KEEP_EVERY_S,
        most_bytes: float = math.inf,
        num_groups: int = 1,
        upscaler: Upscaler | None = None,
        keep_latents: bool = False,
    ) -> None:
        """Connect a rank to its neighbors and surroundings.

        On rank 0, `components` are the denoising components of each rank; none: all ranks have all. A rank that works
        in rounds keeps at most `most_bytes` of waiting samples, and leaves other groups of `num_groups` their share.
        A rank that decodes has the `upscaler`, if there is one, and with `keep_latents` hands them on with the frames.
        """
        assert (surroundings.source is not None) == topology.first
        rank, num_ranks = topology.rank, topology.num_ranks
        self._rank = rank
        self._surroundings = surroundings
        self._stopping = threading.Event()
        #: Measured on rank 0.
        self.costs = CostModel(num_ranks, model.info.prior)
        #: On a rank that works in rounds.
        self.rounds: RoundsInbox | None = None
        if model.sets:
            assert num_ranks == 1
            self.rounds = RoundsInbox(model, surroundings.monitor, surroundings.tracer, most_bytes, num_groups)
        self._inbox = self.rounds or Inbox()
        self._admission: Admission | None = None
        if surroundings.source is not None:
            self._admission = Admission(
                surroundings.source,
                planner or Planner(num_ranks),
                self.costs,
                model,
                components or [None] * num_ranks,
                self._begin,
                self.rounds,
            )
        #: From the rank before, or on rank 0 from the last rank.
        self._incoming: Receiver | None = None
        if links.incoming is not None:
            self._incoming = Receiver(links.incoming, (rank - 1) % num_ranks, surroundings.on_lost)
        self._outlet = Outlet(topology, links, surroundings, self._admission)
        self._warmup = Warmup(model, surroundings.tracer, self._outlet.downstream)
        self._units = UnitLoop(
            rank,
            model,
            device or torch.device("cpu"),
            surroundings,
            done=self._outlet.note,
            is_interrupted=lambda sample: self.stopped or self._inbox.has_before(sample.index),
            is_stopped=self._stopping.is_set,
            keep_every_s=keep_every_s,
            upscaler=upscaler,
            keep_latents=keep_latents,
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Receive, work, pass on, until no more samples come or `stop` is called."""
        # Freeze existing objects, so that no garbage collection traverses all of torch during a stage.
        gc.collect()
        gc.freeze()
        self._start_receiving()
        while (work := self._inbox.take()) is not None:
            if not work.boundaries:
                self._warm_up_for(work)
                continue
            sample, frames = self._units.run(work)
            if self.stopped:
                break
            sample = self._inbox.returned(sample, is_decoded=frames is not None)
            self._hand_over(sample, frames)
        if self._admission is not None and self._admission.error is not None:
            raise self._admission.error
        if not self.stopped:
            self._outlet.close()
            if self._incoming is not None and self._admission is not None:
                self._incoming.join()  # for the last report

    def stop(self) -> None:
        """Make `run` return after the current unit, keeping samples in flight; may be called from any thread."""
        self._stopping.set()
        self._inbox.release()
        if self._admission is not None:
            self._admission.release()
        # After the last sample, rank 0 may wait for reports, and any rank for its last message to be sent.
        if self._incoming is not None:
            self._incoming.release()
        self._outlet.release()

    def end_after_leg(self) -> None:
        """Make `run` of a rank in rounds return when its present sample needs other components; from any thread."""
        self._inbox.release()
        if self._admission is not None:
            self._admission.release()

    def outlook(self) -> dict[str, Outlook]:
        """Forecast the videos of a rank that works in rounds, by job."""
        return {} if self._admission is None else self._admission.outlook()

    @property
    def is_loading(self) -> bool:
        """Whether components are loaded at present, which `stop` does not interrupt."""
        return self._units.is_loading or (self.rounds is not None and self.rounds.is_loading)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def warm_up(self, parameters: VideoParameters) -> None:
        """Do the initialization of a shape's first sample in advance, on this rank."""
        self._warmup.run(parameters)

    def warm_up_group(self, parameters: VideoParameters) -> None:
        """Warm up on all ranks at the same time; on rank 0, before `run`, with the planned decode_chunk_size."""
        self._warmup.announce(Sample(job_id="", parameters=parameters, boundaries=(), step=-1))
        self._warmup.run(parameters)

    def _start_receiving(self) -> None:
        if self._admission is not None:
            self._admission.start(on_end=self._inbox.close)
        if self._incoming is not None and self._admission is not None:
            self._incoming.start(self._admission.handle)
        elif self._incoming is not None:
            self._incoming.start(self._handle)

    def _handle(self, message: Message) -> None:
        """Keep a message, or pass it on: in the receiving thread, so that it waits for no computation and may overtake.

        Raises ValueError or LookupError if it is not valid.
        """
        is_last = self._outlet.downstream is None
        match message.kind:
            case Kind.SAMPLE:
                self._handle_sample(message)
            case Kind.FRAMES if is_last:
                self._outlet.note(*message.work)
                outputs = dict(message.tensors)
                frames = outputs.pop("frames")
                self._outlet.deliver(sample_from(message.body, outputs), frames)
            case Kind.FRAMES | Kind.WORK:
                self._outlet.relay(message)
            case Kind.WARM:
                if not is_last:
                    # Passed on first, so that all ranks warm up at the same time.
                    self._outlet.relay(message)
                self._inbox.put(sample_from(message.body, {}))
            case Kind.CLOSE:
                self._inbox.close()
            case _:
                raise ValueError(f"a {message.kind.value} message does not go down the chain")

    def _handle_sample(self, message: Message) -> None:
        sample = sample_from(message.body, message.tensors)
        if sample.has_work(self._rank):
            self._outlet.note(*message.work)
            self._keep(sample)
        elif self._outlet.downstream is not None:
            self._outlet.relay(message)
        elif sample.ended:
            self._outlet.note(*message.work)
            self._outlet.report(Report.of(sample))
        else:
            raise ValueError(f"no rank decodes the sample {sample.job_id}")

    def _keep(self, sample: Sample) -> None:
        self._inbox.wait_for_room(sum(tensor.nbytes for tensor in sample.tensors.values()))
        self._inbox.put(sample)

    def _begin(self, sample: Sample) -> None:
        """Begin an admitted sample, here or down the chain; in the thread that admits."""
        self._warmup.announce(sample)
        if sample.has_work(self._rank):
            self._keep(sample)
        elif not self.stopped:
            self._outlet.pass_on(sample)

    def _warm_up_for(self, sample: Sample) -> None:
        if sample.job_id:
            # If the warm-up kills ranks, this job is set aside.
            self._surroundings.monitor.warm_up(sample)
        self._warmup.run(sample.parameters)
        self._surroundings.monitor.idle()

    def _hand_over(self, sample: Sample, frames: Tensor | None) -> None:
        """Pass on what is done here; a sample that was interrupted for another waits."""
        self._surroundings.monitor.idle()
        if frames is not None:
            self._outlet.deliver(sample, frames)
        elif sample.has_work(self._rank):
            self._inbox.put(sample)
        else:
            self._outlet.pass_on(sample)
