"""What becomes of the messages that a rank receives: kept for its stage loop, delivered, or passed on."""

from dataclasses import dataclass

from svdq.pipeline.loop.inbox import Inbox
from svdq.pipeline.loop.outlet import Outlet
from svdq.pipeline.loop.protocols import Report
from svdq.pipeline.loop.sample import sample_from
from svdq.pipeline.transport.message import Kind, Message


@dataclass(frozen=True, kw_only=True)
class Router:
    """Handles arrivals in the receiving thread, so that passing messages wait for no computation and may overtake."""

    rank: int  # this rank
    inbox: Inbox  # work for the stage loop
    outlet: Outlet  # for messages that are not kept

    def handle(self, message: Message) -> None:
        """Keep a message, or pass it on; raises ValueError or LookupError if it is not valid."""
        is_last = self.outlet.downstream is None
        match message.kind:
            case Kind.SAMPLE:
                self._handle_sample(message)
            case Kind.FRAMES if is_last:
                self.outlet.note(*message.work)
                self.outlet.deliver(sample_from(message.body, {}), message.tensors["frames"])
            case Kind.FRAMES | Kind.WORK:
                self.outlet.relay(message)
            case Kind.WARM:
                if not is_last:
                    # Passed on first, so that all ranks warm up at the same time.
                    self.outlet.relay(message)
                self.inbox.put(sample_from(message.body, {}))
            case Kind.CLOSE:
                self.inbox.close()
            case _:
                raise ValueError(f"a {message.kind.value} message does not go down the chain")

    def _handle_sample(self, message: Message) -> None:
        sample = sample_from(message.body, message.tensors)
        if sample.has_work(self.rank):
            self.outlet.note(*message.work)
            self.inbox.wait_for_room(sum(tensor.nbytes for tensor in sample.tensors.values()))
            self.inbox.put(sample)
        elif self.outlet.downstream is not None:
            self.outlet.relay(message)
        elif sample.ended:
            self.outlet.note(*message.work)
            self.outlet.report(Report.of(sample))
        else:
            raise ValueError(f"no rank decodes the sample {sample.job_id}")
