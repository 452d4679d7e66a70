"""Links between neighbouring ranks: messages in order, asynchronous, bounded.

A link is a channel with a thread at each end, so that a rank computes one sample while it receives the next and sends
the previous one. The number of samples is bounded: one may be on its way out and one received ahead of need; a second
one waits, which pushes back up to rank 0.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from svdq.pipeline.sample import Tensors
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.message import Kind, Message, sample_from

#: Called once with a sentence, from a link's thread, when the neighbour is gone.
OnLost = Callable[[str], None]


class _NoStream:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _own_stream(device: torch.device) -> "torch.cuda.StreamContext | _NoStream":
    """Give a link's thread its own CUDA stream, so that transfers overlap the computation."""
    if device.type != "cuda":
        return _NoStream()
    # A thread starts on the first GPU, and would open a context there.
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """The unsent rest of a message."""

    message: Message
    #: None: all of it.
    buffers: list[memoryview] | None
    #: On a GPU: when the message's tensors are computed. This keeps them alive until they are sent.
    ready: torch.cuda.Event | None


class Sender:
    """The sending end of a link."""

    def __init__(self, channel: Channel, neighbour: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbour = neighbour
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[_Rest] = queue.SimpleQueue()
        #: Held while a message is on its way. A plain lock, since the thread that finishes a message releases it.
        self._turn = threading.Lock()
        self._released = False
        #: Set when CLOSE is sent, or when `close` must not wait for that any more.
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"send-to-{neighbour}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; waits while the previous one is on its way."""
        self._turn.acquire()
        if self._released:
            return
        if message.tensors and not self._channel.is_direct:
            self._outbox.put(_Rest(message=message, buffers=None, ready=self._now()))
            return
        try:
            # What fits into the socket's buffer is sent at once; the thread is woken only for the rest.
            buffers = self._channel.begin(message)
        except OSError as error:
            self._lost(error)
            return
        if buffers or message.kind is Kind.CLOSE:
            self._outbox.put(_Rest(message=message, buffers=buffers, ready=None))
        else:
            self._turn.release()

    def release(self) -> None:
        """Unblock `send` and `close`; for a rank that stops in the middle of its work."""
        self._released = True
        self._closed.set()
        if self._turn.locked():
            self._turn.release()

    def close(self) -> None:
        """Send CLOSE, and wait until it is sent."""
        self.send(Message(kind=Kind.CLOSE))
        self._closed.wait()

    def _run(self) -> None:
        try:
            with _own_stream(self._channel.device):
                while self._send_rest():
                    pass
            self._channel.close()
        except (OSError, RuntimeError) as error:  # RuntimeError: CUDA's
            self._lost(error)
        finally:
            self._closed.set()

    def _send_rest(self) -> bool:
        rest = self._outbox.get()
        if rest.ready is not None:
            rest.ready.wait()
        buffers = self._channel.begin(rest.message) if rest.buffers is None else rest.buffers
        self._channel.finish(buffers)
        if not self._released:
            self._turn.release()
        return rest.message.kind is not Kind.CLOSE

    def _now(self) -> torch.cuda.Event | None:
        """Return a CUDA event that marks the end of this thread's stream so far."""
        if self._channel.device.type != "cuda":
            return None
        now = torch.cuda.Event()
        now.record()
        return now

    def _lost(self, error: Exception) -> None:
        self._on_lost(f"Cannot send to rank {self._neighbour} any more: {error}.")


class Receiver:
    """The receiving end of a link."""

    def __init__(self, channel: Channel, neighbour: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbour = neighbour
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        #: Held from the arrival of a sample until it is taken.
        self._room = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{neighbour}", daemon=True)
        self._thread.start()

    def receive(self) -> Message:
        """Wait for the next message; CLOSE is the last."""
        message = self._inbox.get()
        if message.tensors:
            self._room.release()
            if self._channel.device.type == "cuda":
                for tensor in message.tensors.values():
                    # Allocated on the receiving thread's stream: the memory must not be reused while we compute on it.
                    tensor.record_stream(torch.cuda.current_stream(self._channel.device))
        return message

    def release(self) -> None:
        """Unblock `receive`, which returns CLOSE; for a rank that stops in the middle of its work."""
        self._inbox.put(Message(kind=Kind.CLOSE))

    def _run(self) -> None:
        try:
            with _own_stream(self._channel.device):
                while self._receive_next():
                    pass
            self._channel.close()
        except (OSError, RuntimeError, ValueError) as error:  # ValueError: an invalid sample
            self._on_lost(f"Cannot receive from rank {self._neighbour} any more: {error}.")

    def _receive_next(self) -> bool:
        message, layout = self._channel.receive_header()
        if message.kind is Kind.SAMPLE:
            tensors: Tensors = {}
            if layout:
                self._room.acquire()
                tensors = self._channel.receive_tensors(layout)
            # Decoded here, in parallel with the current computation.
            message = replace(message, tensors=tensors, sample=sample_from(message.body, tensors))
        self._inbox.put(message)
        return message.kind is not Kind.CLOSE
