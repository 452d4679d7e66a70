"""One-way channels between neighbouring ranks: how a message gets from process to process. Knows no models or jobs.

Headers and tensors go through a socket, from and to GPUs by way of pinned memory of the host. docs/architecture.md says
why neither NCCL nor gloo is used.

A neighbour that dies closes its socket, and the kernel's keep-alive probes notice a host that is gone, within seconds
and at no cost: an idle channel has no time-out and wakes nobody. Only the receiving end notices that, since nobody is
probed while something is on its way to them; every host has one, for the channels of a group are a ring.
"""

import contextlib
import socket
import struct
from typing import Final

import torch
from torch import Tensor

from svdq.pipeline.transport.message import (
    MAX_HEADER_BYTES,
    Layout,
    Message,
    allocate,
    byte_views,
    decode_header,
    encode_header,
    on_host,
)

#: Length of the header that follows, in bytes.
_LENGTH: Final = struct.Struct("!I")
#: Buffers that one system call takes (IOV_MAX is 1024 on Linux and macOS).
_MAX_BUFFERS = 256


class ChannelClosedError(ConnectionError):
    """The neighbour is gone without having said CLOSE."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket, device: torch.device) -> None:
        """Wrap a connected socket.

        Args:
            connection: to the neighbour.
            device: where received tensors are wanted.
        """
        self._connection = connection
        self.device = device

    @property
    def is_direct(self) -> bool:
        """Whether tensors are bytes that the kernel can take at once; else a GPU is waited for."""
        return self.device.type == "cpu"

    def begin(self, message: Message) -> list[memoryview]:
        """Begin to send a message: give the kernel what it takes at once, and return what is left.

        Spares waking a thread for what fits into the socket's buffer.
        """
        header = encode_header(message)
        buffers = [memoryview(_LENGTH.pack(len(header)) + header), *byte_views(on_host(message.tensors))]
        with contextlib.suppress(BlockingIOError):
            return self._send_some(buffers, socket.MSG_DONTWAIT)
        return buffers

    def finish(self, buffers: list[memoryview]) -> None:
        """Send what `begin` left, and wait until all is on its way.

        Raises:
            OSError: the neighbour is gone.
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

    def receive_header(self) -> tuple[Message, Layout]:
        """Wait for the next message, for days if need be, and return all of it but its tensors, and what these are.

        Raises:
            ChannelClosedError: the neighbour is gone.
            ValueError: what it sent is not a message.
        """
        length = bytearray(_LENGTH.size)
        self._receive_exactly(memoryview(length))
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header has {num_bytes:,} bytes")
        header = bytearray(num_bytes)
        self._receive_exactly(memoryview(header))
        return decode_header(header)

    def receive_tensors(self, layout: Layout) -> dict[str, Tensor]:
        """Receive the tensors that a header has announced, onto the device."""
        on_gpu = self.device.type == "cuda"
        tensors = allocate(layout, torch.device("cpu"), pin_memory=on_gpu)
        for view in byte_views(tensors):
            self._receive_exactly(view)
        if on_gpu:
            tensors = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
            torch.cuda.current_stream(self.device).synchronize()
        return tensors

    def close(self) -> None:
        """Close the socket; what was sent still arrives."""
        self._connection.close()

    def _receive_exactly(self, rest: memoryview) -> None:
        while rest:
            num_received = self._connection.recv_into(rest, flags=socket.MSG_WAITALL)
            if num_received == 0:
                raise ChannelClosedError("it closed the connection")
            rest = rest[num_received:]
