"""One-way channels between neighboring ranks, over Unix sockets.

Headers go through the socket, and with them the descriptors of files in memory that hold the tensors, so a rank that
passes a message on copies nothing. docs/internals/architecture.md explains why neither NCCL nor gloo is used.

If a neighbor dies, its socket closes. An idle channel has no timeout and wakes no process.
"""

import contextlib
import socket
import struct
from array import array
from dataclasses import dataclass, replace
from typing import Final

import torch

from svdq.pipeline.transport.message import Message, SharedTensors, decode_header, encode_header

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
