"""Messages between ranks: a small JSON header, and tensors in shared memory; nothing in them is executed."""

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self

import torch
from pydantic_core import from_json, to_json
from torch import Tensor

_ALIGNMENT = 64  # tensors begin at multiples of so many bytes


class Kind(Enum):
    """The kind of a message."""

    SAMPLE = "sample"
    FRAMES = "frames"  # the frames of a video for the last rank, uint8, its sound, if any, and its sample
    WARM = "warm"  # a shape of video to warm up for
    WORK = "work"  # finished work alone; other messages carry it along
    CLOSE = "close"  # the last message
    REPORT = "report"  # from the last rank to rank 0: how a video ended


class Work(NamedTuple):
    """Units that a rank has finished, as rank 0's planner counts them; a tuple, which is JSON already."""

    rank: int  # who did them
    sample: int  # `Sample.index`
    #: The units: the encode alone, steps of the same relative cost alone, or the decode alone.
    start: int
    stop: int
    seconds: float  # how long they took
    upscale_s: float = 0.0  # how much of that was upscaling, which is part of the decode


class SharedTensors:
    """Tensors in an unnamed file in memory, which processes share by passing on its descriptor."""

    def __init__(self, specs: Sequence[tuple[str, str, Sequence[int]]], descriptor: int) -> None:
        """Take over an open file; `specs` are name, dtype and shape of each tensor, in order."""
        self.specs = specs
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Copy tensors of any device to a new file."""
        tensors = on_host(tensors)
        specs = [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]
        descriptor = _memory_file()
        with open(descriptor, "wb", closefd=False) as file:
            for tensor in tensors.values():
                file.write(byte_view(tensor))
                file.write(bytes(-file.tell() % _ALIGNMENT))
        return cls(specs, descriptor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, without a copy; they keep the memory, not its descriptor."""
        memory: mmap.mmap | None = None
        found, start = {}, 0
        for name, dtype_name, shape in self.specs:
            dtype, number = getattr(torch, dtype_name), math.prod(shape)
            found[name] = torch.empty(shape, dtype=dtype)
            if number:
                memory = memory or mmap.mmap(self.descriptor, 0)  # of an empty file there is none
                found[name] = torch.frombuffer(memory, dtype=dtype, count=number, offset=start).view(shape)
            start += number * dtype.itemsize
            start += -start % _ALIGNMENT
        return found


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of any kind."""

    kind: Kind
    body: Mapping[str, Any] = field(default_factory=dict)  # the content as JSON; empty for a close
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of a sample, or `frames` (F, H, W, 3) and `sound`
    shared: SharedTensors | None = None  # the memory of the tensors, once they have been sent; passed on as it is
    work: Sequence[Work] = ()  # what ranks up the chain have finished


def encode_header(message: Message) -> bytes:
    """Encode all of a message but the content of its tensors, which are shared, as JSON."""
    specs = message.shared.specs if message.shared is not None else ()
    document = {"kind": message.kind.value, "body": message.body, "tensors": specs, "work": message.work}
    # pydantic's JSON encoder: after a sleep, the json module takes several times as long to get back into the cache.
    return to_json(document)


def decode_header(header: bytes | bytearray, descriptor: int | None) -> Message:
    """Read a message, whose tensors `descriptor` has in memory; raises ValueError or LookupError."""
    document = from_json(header)
    work = [Work(*each) for each in document["work"]]
    shared = SharedTensors(document["tensors"], descriptor) if descriptor is not None else None
    tensors = shared.tensors() if shared is not None else {}
    return Message(kind=Kind(document["kind"]), body=document["body"], tensors=tensors, shared=shared, work=work)


def on_host(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copy GPU tensors to pinned host memory, asynchronously with one wait for all."""
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    if not devices:
        return tensors
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a host tensor as a view; one that is not contiguous is copied first."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("svdq")
    with tempfile.TemporaryFile() as file:  # on macOS
        return os.dup(file.fileno())
