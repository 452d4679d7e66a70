"""Links between neighboring ranks: messages in order, asynchronous, bounded.

A link is a channel with a thread at each end, so that a rank computes one sample while it receives the next and sends
the previous one. Several threads of a rank send to one link, one message at a time, which pushes back up to rank 0.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from svdq.pipeline.transport.channel import Channel, Unsent
from svdq.pipeline.transport.message import Kind, Message, Work

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
