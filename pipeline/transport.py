"""Links between neighbouring ranks: messages in order, asynchronous, bounded. Knows no models or jobs.

A link is a channel with a thread at each end, so that a rank computes one sample while it receives the next and sends
the one before. What is bounded is samples: one may be on its way out and one received ahead of need; a second one
waits, and so pushes back up to rank 0.
"""

import queue
import threading
from collections.abc import Callable

import torch

from svdq.pipeline.channel import Channel
from svdq.pipeline.message import Kind, Message

#: Called once, from a link's thread, when the neighbour is gone; takes a sentence.
OnLost = Callable[[str], None]


class _NoStream:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _own_stream(device: torch.device) -> "torch.cuda.StreamContext | _NoStream":
    """Give a link's thread a CUDA stream of its own, so that transfers overlap the computation."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else _NoStream()


class Sender:
    """The near end of a link."""

    def __init__(self, channel: Channel, neighbour: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbour = neighbour
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[tuple[Message, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._thread = threading.Thread(target=self._run, name=f"send-to-{neighbour}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message; waits while the sample before it is still on its way."""
        ready = None
        if message.tensors:
            self._room.acquire()
            if self._channel.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()
        self._outbox.put((message, ready))

    def release(self) -> None:
        """Let a `send` that waits go on; for a rank that stops in the middle of its work."""
        self._room.release()

    def close(self) -> None:
        """Say that no more will come, and wait until that is said."""
        self.send(Message(kind=Kind.CLOSE))
        self._thread.join()

    def _run(self) -> None:
        try:
            with _own_stream(self._channel.device):
                while self._send_next():
                    pass
        except (OSError, RuntimeError) as error:  # RuntimeError: NCCL's
            self._on_lost(f"Rank {self._neighbour} cannot be sent to any more: {error}.")

    def _send_next(self) -> bool:
        message, ready = self._outbox.get()
        if ready is not None:
            ready.wait()
        self._channel.send(message)
        if message.tensors:
            self._room.release()
        return message.kind is not Kind.CLOSE


class Receiver:
    """The far end of a link."""

    def __init__(self, channel: Channel, neighbour: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbour = neighbour
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{neighbour}", daemon=True)
        self._thread.start()

    def receive(self) -> Message:
        """Wait for the next message; CLOSE is the last."""
        message = self._inbox.get()
        if message.tensors:
            self._room.release()
            if self._channel.device.type == "cuda":
                for tensor in message.tensors.values():
                    # Made on the receiving thread's stream: its memory must not be taken again while we compute on it.
                    tensor.record_stream(torch.cuda.current_stream(self._channel.device))
        return message

    def release(self) -> None:
        """Let a `receive` that waits return CLOSE; for a rank that stops in the middle of its work."""
        self._inbox.put(Message(kind=Kind.CLOSE))

    def _run(self) -> None:
        try:
            with _own_stream(self._channel.device):
                while self._receive_next():
                    pass
        except (OSError, RuntimeError) as error:
            self._on_lost(f"Rank {self._neighbour} cannot be heard any more: {error}.")

    def _receive_next(self) -> bool:
        announcement = self._channel.receive_header()
        message = announcement.message
        if announcement.layout:
            self._room.acquire()
            tensors = self._channel.receive_payload(announcement.layout)
            message = Message(kind=message.kind, body=message.body, tensors=tensors)
        self._inbox.put(message)
        return message.kind is not Kind.CLOSE
