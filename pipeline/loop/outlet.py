"""Passes on the work of a rank: samples down the chain, frames to the sink, ends and finished work to rank 0."""

from dataclasses import replace

from torch import Tensor

from svdq.pipeline.loop.admission import Admission
from svdq.pipeline.loop.protocols import Report, Surroundings
from svdq.pipeline.loop.sample import Sample, sample_body
from svdq.pipeline.transport.links import Sender
from svdq.pipeline.transport.message import Kind, Message, Work, on_host
from svdq.pipeline.transport.topology import Links, Topology


class Outlet:
    """The sending side of a rank."""

    def __init__(
        self, topology: Topology, links: Links, surroundings: Surroundings, admission: Admission | None
    ) -> None:
        assert (surroundings.sink is not None) == topology.last
        self._sink = surroundings.sink
        self._admission = admission
        #: To the next rank, or from the last rank to rank 0; None on a single rank.
        self._sender: Sender | None = None
        if links.outgoing is not None:
            neighbor = (topology.rank + 1) % topology.num_ranks
            self._sender = Sender(links.outgoing, neighbor, surroundings.on_lost)
        #: To the next rank; None on the last.
        self.downstream = None if topology.last else self._sender

    def pass_on(self, sample: Sample) -> None:
        """Send a sample to the next rank, from the last one report its end."""
        if self.downstream is not None:
            self.downstream.send(Message(kind=Kind.SAMPLE, body=sample_body(sample), tensors=sample.tensors))
        else:
            self.report(Report.of(sample))

    def deliver(self, sample: Sample, frames: Tensor) -> None:
        """Give frames (F, H, W, 3), and the sound in the sample, to the sink, or send them to the rank that has it."""
        if self.downstream is not None:
            # The link's thread copies them to the host and sends them.
            tensors = {"frames": frames, **sample.tensors}
            self.downstream.send(Message(kind=Kind.FRAMES, body=sample_body(sample), tensors=tensors))
            return
        assert self._sink is not None
        outputs = dict(on_host({"frames": frames, **sample.tensors}))
        frames = outputs.pop("frames")
        self._sink.deliver(replace(sample, tensors=outputs), frames.numpy(), self.report)

    def relay(self, message: Message) -> None:
        """Pass on a message that is not for this rank."""
        assert self._sender is not None
        self._sender.send(message)

    def note(self, *work: Work) -> None:
        """Have rank 0 learn of finished work, soon or with the next message."""
        if self._admission is not None:
            self._admission.on_work(work)
        elif self._sender is not None:
            self._sender.note(work)
            self._sender.send_work()

    def report(self, report: Report) -> None:
        """Report the end of a sample, on the last rank; from any thread."""
        if self._sender is not None:
            self._sender.send(Message(kind=Kind.REPORT, body=vars(report)))
        else:
            assert self._admission is not None
            self._admission.on_report(report)

    def close(self) -> None:
        """Close sink and link after everything that was passed on."""
        if self._sink is not None:
            self._sink.close()
        if self._sender is not None:
            self._sender.close()

    def release(self) -> None:
        """Unblock everything that waits to be passed on; for a rank that stops."""
        if self._sender is not None:
            self._sender.release()
        if self._sink is not None:
            self._sink.release()
