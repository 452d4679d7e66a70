"""One-way channels between neighboring ranks, over sockets.

Headers and tensors go through a socket, from and to GPUs by way of pinned memory of the host.
docs/internals/architecture.md explains why neither NCCL nor gloo is used.

If a neighbor dies, its socket closes. An idle channel has no timeout and wakes no process.
"""

import contextlib
import socket
import struct
from typing import Final

import torch
from torch import Tensor

from svdq.pipeline.transport.message import (
    Message,
    TensorSpecs,
    allocate,
    byte_views,
    decode_header,
    encode_header,
    on_host,
)

#: Length of the header that follows, in bytes.
_LENGTH: Final = struct.Struct("!I")
#: Largest number of buffers per system call (IOV_MAX is 1024 on Linux and macOS).
_MAX_BUFFERS = 256


class ChannelClosedError(ConnectionError):
    """The neighbor closed the connection without a CLOSE message."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket, device: torch.device) -> None:
        """Wrap a connected socket; tensors are copied from and to the rank's device."""
        self._connection = connection
        self.device = device

    @property
    def is_direct(self) -> bool:
        """Whether tensors are in host memory, so that sending them does not wait for a GPU."""
        return self.device.type == "cpu"

    def begin(self, message: Message) -> list[memoryview]:
        """Start sending a message: pass the kernel what it accepts at once, and return the rest.

        This avoids waking a thread for a message that fits into the socket's buffer.
        """
        header = encode_header(message)
        framed = memoryview(_LENGTH.pack(len(header)) + header)
        buffers = [framed, *byte_views(on_host(message.tensors))]
        with contextlib.suppress(BlockingIOError):
            return self._send_some(buffers, socket.MSG_DONTWAIT)
        return buffers

    def finish(self, buffers: list[memoryview]) -> None:
        """Send the rest from `begin`, and wait until the kernel has all of it.

        Raises:
            OSError: the neighbor is gone.
        """
        while buffers:
            buffers = self._send_some(buffers, 0)

    def _send_some(self, buffers: list[memoryview], flags: int) -> list[memoryview]:
        num_sent = self._connection.sendmsg(buffers[:_MAX_BUFFERS], (), flags)
        for position, buffer in enumerate(buffers):
            if num_sent < len(buffer):
                return [buffer[num_sent:], *buffers[position + 1 :]]
            num_sent -= len(buffer)
        return []

    def receive_header(self) -> tuple[Message, TensorSpecs]:
        """Wait, possibly for days, for the next message; return it without its tensors, and their specifications.

        Raises:
            ChannelClosedError: the neighbor is gone.
            ValueError, LookupError: the data is not a message.
        """
        (num_bytes,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        return decode_header(self._receive_exactly(num_bytes))

    def receive_tensors(self, specs: TensorSpecs) -> dict[str, Tensor]:
        """Receive the tensors that a header has announced, into memory of the host; pinned if the rank has a GPU."""
        tensors = allocate(specs, pin_memory=self.device.type == "cuda")
        for view in byte_views(tensors):
            self._receive_into(view)
        return tensors

    def close(self) -> None:
        """Close the socket; sent data still arrives."""
        self._connection.close()

    def _receive_exactly(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        self._receive_into(memoryview(received))
        return received

    def _receive_into(self, rest: memoryview) -> None:
        while rest:
            num_received = self._connection.recv_into(rest, flags=socket.MSG_WAITALL)
            if num_received == 0:
                raise ChannelClosedError("it closed the connection")
            rest = rest[num_received:]
