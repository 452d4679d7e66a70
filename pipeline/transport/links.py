"""Links between neighboring ranks: messages in order, asynchronous, bounded.

A channel is one way, over a Unix socket. Headers go through it, and with them the descriptors of files in memory
that hold the tensors, so a rank that passes one on copies nothing. docs/internals/architecture.md explains why
neither NCCL nor gloo is used. If a neighbor dies, its socket closes. An idle channel wakes no process.

A link is a channel with a thread at each end, so that a rank computes one sample while it receives the next and sends
the previous one. Several threads of a rank send to one link, one message at a time, which pushes back up to rank 0.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from svdq.pipeline.transport.message import Kind, Message, SharedTensors, Work, decode_header, encode_header

_LENGTH: Final = struct.Struct("!I")  # length of the header that follows, in bytes
#: Buffer of a connection in bytes, for a few headers; Linux takes twice as much. A sender waits when it is full, so the
#: memory of the tensors that are on their way stays bounded.
_BUFFER_BYTES: Final = 8192


class ChannelClosedError(ConnectionError):
    """The neighbor closed the connection without a CLOSE message."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket, device: torch.device) -> None:
        """Wrap a connected socket; tensors are copied from and to the rank's device."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._connection = connection
        self.device = device

    def begin(self, message: Message) -> "Unsent | None":
        """Pass the kernel what it accepts of a message at once, without waking a thread; return the rest."""
        if message.shared is None and message.tensors:
            message = replace(message, shared=SharedTensors.of(message.tensors))
        header = encode_header(message)
        unsent = Unsent(memoryview(_LENGTH.pack(len(header)) + header), message.shared)
        with contextlib.suppress(BlockingIOError):
            return self._send_some(unsent, socket.MSG_DONTWAIT)
        return unsent

    def finish(self, unsent: "Unsent | None") -> None:
        """Send the rest from `begin`, until the kernel has all of it; raises OSError if the neighbor is gone."""
        while unsent is not None:
            unsent = self._send_some(unsent, 0)

    def _send_some(self, unsent: "Unsent", flags: int) -> "Unsent | None":
        descriptors = [] if unsent.shared is None else [array("i", [unsent.shared.descriptor])]
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in descriptors]
        num_sent = self._connection.sendmsg([unsent.header], passed, flags)
        rest = unsent.header[num_sent:]
        return Unsent(rest, None) if rest else None

    def receive(self) -> Message:
        """Wait, for days if need be, for a message; raises ChannelClosedError, and ValueError or LookupError."""
        # The descriptor comes with the first byte.
        length, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH.size, 1)
        length += self._receive_exactly(_LENGTH.size - len(length), closed=not length)
        header = self._receive_exactly(*_LENGTH.unpack(length))
        return decode_header(header, descriptors[0] if descriptors else None)

    def _receive_exactly(self, num_bytes: int, *, closed: bool = False) -> bytearray:
        received = bytearray(num_bytes)
        rest = memoryview(received)
        while rest:
            num_received = 0 if closed else self._connection.recv_into(rest, flags=socket.MSG_WAITALL)
            if num_received == 0:
                raise ChannelClosedError("it closed the connection")
            rest = rest[num_received:]
        return received

    def close(self) -> None:
        """Close the socket; sent data still arrives."""
        self._connection.close()


@dataclass(frozen=True)
class Unsent:
    """What the kernel has not yet taken of a message."""

    header: memoryview
    shared: SharedTensors | None  # the tensors, which are passed on with the next byte


OnLost = Callable[[str], None]  # called once with a sentence, from a link's thread, when the neighbor is gone

#: Seconds between two messages that carry nothing but finished work. Where more is finished, samples follow each other
#: as quickly and carry it along, so that very short steps are not held up by threads that wake for news.
WORK_EVERY_S = 0.1


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Give a thread its own CUDA stream, so that its copies overlap the computation."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)  # a thread starts on the first GPU, and would open a context there
    return torch.cuda.stream(torch.cuda.Stream(device))


def end_of_stream(device: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event that marks the end of this thread's stream so far; None without a GPU."""
    if device.type != "cuda":
        return None
    now = torch.cuda.Event()
    now.record()
    return now


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """The unsent rest of a message."""

    message: Message
    #: Whether sending it has begun, and what is left of it then.
    begun: bool
    unsent: Unsent | None
    ready: torch.cuda.Event | None  # on a GPU: when its tensors, kept alive until then, are computed


class Sender:
    """The sending end of a link; any thread may send."""

    def __init__(self, channel: Channel, neighbor: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbor = neighbor
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[_Rest] = queue.SimpleQueue()
        #: Taken while a message is on its way; the thread that finishes it gives it back.
        self._turn = threading.Semaphore()
        #: Finished work that the next message carries along. Appending and taking are atomic.
        self._work: deque[Work] = deque()
        self._work_sent_at = -WORK_EVERY_S
        self._released = False
        self._closed = threading.Event()  # set when CLOSE is sent, or when `close` must not wait for that any more
        threading.Thread(target=self._run, name=f"send-to-{neighbor}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; waits while the previous one is on its way."""
        self._turn.acquire()
        if self._released:
            return
        message = self._with_work(message)
        # Frames and tensors of a GPU have to be copied first, which the caller's GPU need not wait for.
        copies = message.shared is None and bool(message.tensors)
        if copies and (message.kind is Kind.FRAMES or self._channel.device.type != "cpu"):
            ready = end_of_stream(self._channel.device)
            self._outbox.put(_Rest(message=message, begun=False, unsent=None, ready=ready))
            return
        try:
            # What fits into the socket's buffer is sent at once; the thread is woken only for the rest.
            unsent = self._channel.begin(message)
        except OSError as error:
            self._lost(error)
            return
        if unsent is not None or message.kind is Kind.CLOSE:
            self._outbox.put(_Rest(message=message, begun=True, unsent=unsent, ready=None))
        else:
            self._turn.release()

    def note(self, work: Iterable[Work]) -> None:
        """Have the next message carry finished work along."""
        self._work.extend(work)

    def send_work(self) -> None:
        """Send noted work now, unless a message with work alone was sent just before: then the next one carries it."""
        if self._work and time.monotonic() - self._work_sent_at >= WORK_EVERY_S:
            self._work_sent_at = time.monotonic()
            self.send(Message(kind=Kind.WORK))

    def release(self) -> None:
        """Unblock `send` and `close`; for a rank that stops in the middle of its work."""
        self._released = True
        self._closed.set()
        self._turn.release(1 << 10)  # more than there are threads

    def close(self) -> None:
        """Send CLOSE, and wait until it is sent."""
        self.send(Message(kind=Kind.CLOSE))
        self._closed.wait()

    def _run(self) -> None:
        try:
            with own_stream(self._channel.device):
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
        self._channel.finish(rest.unsent if rest.begun else self._channel.begin(rest.message))
        self._turn.release()
        return rest.message.kind is not Kind.CLOSE

    def _with_work(self, message: Message) -> Message:
        """Return the message with all noted work, before what it carries already, which is newer."""
        work = []
        while self._work:
            work.append(self._work.popleft())
        return replace(message, work=[*work, *message.work]) if work else message

    def _lost(self, error: Exception) -> None:
        self._on_lost(f"Cannot send to rank {self._neighbor} any more: {error}.")


class Receiver:
    """The receiving end of a link: a thread that hands over each message, in order."""

    def __init__(self, channel: Channel, neighbor: int, on_lost: OnLost) -> None:
        self._channel = channel
        self._neighbor = neighbor
        self._on_lost = on_lost
        self._closed = threading.Event()  # set when CLOSE has arrived, or when `join` must not wait for that any more

    def start(self, handle: Callable[[Message], None]) -> None:
        """Begin to receive in a thread, which calls `handle` with each message while the next waits; CLOSE is last."""
        target = partial(self._run, handle)
        threading.Thread(target=target, name=f"receive-from-{self._neighbor}", daemon=True).start()

    def join(self) -> None:
        """Wait until CLOSE is handled, or `release` is called."""
        self._closed.wait()

    def release(self) -> None:
        """Unblock `join`; for a rank that stops in the middle of its work."""
        self._closed.set()

    def _run(self, handle: Callable[[Message], None]) -> None:
        try:
            if self._channel.device.type == "cuda":
                torch.cuda.set_device(self._channel.device)  # as in `own_stream`
            kind = None
            while kind is not Kind.CLOSE:
                message = self._channel.receive()
                kind = message.kind
                handle(message)
            self._channel.close()
        except (OSError, RuntimeError, ValueError, LookupError) as error:  # the last two: an invalid sample
            self._on_lost(f"Cannot receive from rank {self._neighbor} any more: {error}.")
        finally:
            self._closed.set()
