"""What a rank does with the messages of the rank before it: keep its own work, pass on the rest at once."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from svdq.pipeline.inbox import Inbox, PendingWarmup
from svdq.pipeline.models.family_parameters import parse_parameters
from svdq.pipeline.protocols import Report, Sink
from svdq.pipeline.sample import sample_from
from svdq.pipeline.transport.links import Arrival, Sender
from svdq.pipeline.transport.message import Kind


@dataclass(frozen=True, kw_only=True)
class Router:
    """Handles arrivals in the receiving thread, so that what passes by waits for no computation and may overtake."""

    #: This rank.
    rank: int
    #: Work for the stage loop.
    inbox: Inbox
    #: To the next rank, or on the last rank to rank 0.
    outgoing: Sender
    #: Receives frames; on the last rank only.
    sink: Sink | None
    #: Reports the end of a sample; used on the last rank only.
    report: Callable[[Report], None]

    def handle(self, arrival: Arrival) -> None:
        """Keep a message, or pass it on.

        Raises:
            ValueError, LookupError: it is not valid.
        """
        message = arrival.message
        match message.kind:
            case Kind.SAMPLE:
                self._handle_sample(arrival)
            case Kind.FRAMES if self.sink is not None:
                self._announce_work(arrival)
                sample = sample_from(message.body, {})
                self.sink.deliver(sample, arrival.receive()["frames"].numpy(), self.report)
            case Kind.FRAMES | Kind.WORK:
                arrival.relay(self.outgoing)
            case Kind.WARM:
                if self.sink is None:
                    # Passed on first, so that all ranks warm up at the same time.
                    arrival.relay(self.outgoing)
                parameters = parse_parameters(message.body["parameters"])
                self.inbox.put(
                    PendingWarmup(index=message.body["index"], job_id=message.body["job_id"], parameters=parameters)
                )
            case Kind.CLOSE:
                self.inbox.close()
            case _:
                raise ValueError(f"a {message.kind.value} message does not go down the chain")

    def _handle_sample(self, arrival: Arrival) -> None:
        tensors: dict[str, Tensor] = {}
        sample = sample_from(arrival.message.body, tensors)
        if sample.has_work(self.rank):
            self._announce_work(arrival)
            self.inbox.wait_for_room(arrival.num_bytes)
            tensors.update(arrival.receive())
            self.inbox.put(sample)
        elif self.sink is None:
            arrival.relay(self.outgoing)
        elif sample.ended:
            self.outgoing.note(arrival.message.work)
            self.report(Report.of(sample))
        else:
            raise ValueError(f"no rank decodes the sample {sample.job_id}")

    def _announce_work(self, arrival: Arrival) -> None:
        """Send what a message that stays here carries along."""
        self.outgoing.note(arrival.message.work)
        self.outgoing.send_work()
