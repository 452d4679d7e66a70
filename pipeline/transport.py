"""Messages between neighbouring ranks over torch.distributed: asynchronous, in order, bounded. Knows no models or jobs.

A link goes one way between two ranks: a `Sender` on one side, a `Receiver` on the other, each with a thread of its own,
so that a rank computes one sample while it receives the next and sends the one before. The header goes first, through
gloo; the receiver then knows what comes and posts the receive of the payload once it has room, so that no receive (on a
GPU, no NCCL kernel) waits for data that is not on its way. A sender with nothing to say sends a tick, so that a dead
neighbour is noticed and no receive ever reaches a time-out.
"""

import datetime
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from svdq.pipeline.message import (
    HEADER_BYTES,
    Kind,
    Layout,
    Message,
    decode_header,
    encode_header,
    layout_of,
    pack,
    payload_bytes,
    unpack,
)

logger = logging.getLogger(__name__)

#: A sender that has nothing to say says so this often.
TICK_S = 2.0
#: No collective or receive is ever meant to time out: a group may wait days for a job.
NO_TIMEOUT = datetime.timedelta(days=365)

#: Called once, from a link's thread, when the neighbour is gone; takes a sentence.
OnLost = Callable[[str], None]


class Wire:
    """How bytes get from rank to rank: headers through gloo, payloads through gloo or NCCL."""

    def __init__(self, device: torch.device, *, payload_backend: str) -> None:
        self.device = device
        #: gloo for CPUs and for several ranks on one GPU (NCCL refuses two ranks on one device), else nccl.
        self.payload_backend = payload_backend
        self._stage_on_host = device.type == "cuda" and payload_backend == "gloo"

    @property
    def _payload_device(self) -> torch.device:
        return torch.device("cpu") if self._stage_on_host else self.device

    def send(self, message: Message, rank: int) -> None:
        """Send a message and wait until it has left."""
        dist.send(encode_header(message), rank)
        if message.tensors:
            num_bytes = payload_bytes(layout_of(message.tensors))
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._payload_device)
            pack(message.tensors, payload)
            dist.send(payload, rank)

    def receive_header(self, rank: int) -> Tensor:
        """Wait for the next header."""
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.recv(header, rank)
        return header

    def receive_payload(self, layout: Layout, rank: int) -> dict[str, Tensor]:
        """Receive the payload that a header has announced, onto the device."""
        payload = torch.empty(payload_bytes(layout), dtype=torch.uint8, device=self._payload_device)
        dist.recv(payload, rank)
        return unpack(layout, payload.to(self.device) if self._stage_on_host else payload)

    def stream(self) -> "torch.cuda.StreamContext | _NoStream":
        """Give a link's thread a CUDA stream of its own, so that transfers overlap the computation."""
        if self.device.type == "cuda":
            return torch.cuda.stream(torch.cuda.Stream(self.device))
        return _NoStream()


class _NoStream:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class Sender:
    """The near end of a link: messages to one rank, in order."""

    def __init__(self, wire: Wire, rank: int, on_lost: OnLost) -> None:
        self._wire = wire
        self._rank = rank
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[tuple[Message, torch.cuda.Event | None]] = queue.SimpleQueue()
        #: One sample may be on its way while the next is computed; a second one has to wait.
        self._room = threading.Semaphore(1)
        self._thread = threading.Thread(target=self._run, name=f"send-to-{rank}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message; waits while the sample before it is still on its way."""
        if message.tensors:
            self._room.acquire()
        ready = None
        if self._wire.device.type == "cuda" and message.tensors:
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
            with self._wire.stream():
                while self._send_next():
                    pass
        except RuntimeError as error:
            self._on_lost(f"rank {self._rank} cannot be sent to any more: {error}")

    def _send_next(self) -> bool:
        try:
            message, ready = self._outbox.get(timeout=TICK_S)
        except queue.Empty:
            message, ready = Message(kind=Kind.TICK), None
        if ready is not None:
            ready.wait()
        self._wire.send(message, self._rank)
        if message.tensors:
            self._room.release()
        return message.kind is not Kind.CLOSE


class Receiver:
    """The far end of a link: messages from one rank, in order, at most one sample ahead of need."""

    def __init__(self, wire: Wire, rank: int, on_lost: OnLost) -> None:
        self._wire = wire
        self._rank = rank
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        #: One sample may be received ahead of the one that is being computed.
        self._room = threading.Semaphore(1)
        #: time.monotonic() of the last sign of life; None while a payload waits for room.
        self.heard_at: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"receive-from-{rank}", daemon=True)
        self._thread.start()

    def receive(self) -> Message:
        """Wait for the next message that is not a tick; CLOSE is the last."""
        message = self._inbox.get()
        if message.tensors:
            self._room.release()
            if self._wire.device.type == "cuda":
                for tensor in message.tensors.values():
                    # Made on the receiving thread's stream: its memory must not be taken again while we compute on it.
                    tensor.record_stream(torch.cuda.current_stream(self._wire.device))
        return message

    def release(self) -> None:
        """Let a `receive` that waits return CLOSE; for a rank that stops in the middle of its work."""
        self._inbox.put(Message(kind=Kind.CLOSE))

    def _run(self) -> None:
        try:
            with self._wire.stream():
                while self._receive_next():
                    pass
        except RuntimeError as error:
            self._on_lost(f"rank {self._rank} cannot be heard any more: {error}")

    def _receive_next(self) -> bool:
        header = self._wire.receive_header(self._rank)
        kind, body, layout = decode_header(header)
        tensors: dict[str, Tensor] = {}
        if layout:
            self.heard_at = None
            self._room.acquire()
            tensors = self._wire.receive_payload(layout, self._rank)
            if self._wire.device.type == "cuda":
                torch.cuda.current_stream(self._wire.device).synchronize()
        self.heard_at = time.monotonic()
        if kind is not Kind.TICK:
            self._inbox.put(Message(kind=kind, body=body, tensors=tensors))
        return kind is not Kind.CLOSE
