"""Messages between ranks: a small JSON header and, for a sample, a payload with its tensors in sequence.

Messages contain no pickle or other executable data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from pydantic_core import from_json, to_json
from torch import Tensor

#: Name, dtype and shape of each tensor of a message, in order.
TensorSpecs = Sequence[tuple[str, str, Sequence[int]]]


class Kind(Enum):
    """The kind of a message."""

    #: A sample.
    SAMPLE = "sample"
    #: The frames of a video for the last rank, uint8, and its sample.
    FRAMES = "frames"
    #: A shape of video to warm up for.
    WARM = "warm"
    #: Finished work alone; other messages carry it along.
    WORK = "work"
    #: The last message.
    CLOSE = "close"
    #: From the last rank to rank 0: how a video ended.
    REPORT = "report"


class Work(NamedTuple):
    """Units that a rank has finished, as rank 0's planner counts them; a tuple, which is JSON already."""

    #: Who did them.
    rank: int
    #: `Sample.index`.
    sample: int
    #: The units: the encode alone, steps alone, or the decode alone.
    start: int
    stop: int
    #: How long they took.
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of any kind."""

    kind: Kind
    #: The content as JSON; empty for a close.
    body: Mapping[str, Any] = field(default_factory=dict)
    #: The tensors of a sample, or `frames` (F, H, W, 3), uint8.
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    #: What ranks up the chain have finished.
    work: Sequence[Work] = ()


def encode_header(message: Message) -> bytes:
    """Encode all of a message but the content of its tensors as JSON."""
    specs = [(name, _dtype_name(tensor.dtype), list(tensor.shape)) for name, tensor in message.tensors.items()]
    document: dict[str, Any] = {"kind": message.kind.value, "body": message.body, "tensors": specs}
    if message.work:
        document["work"] = message.work
    # pydantic's JSON encoder: after a sleep, the json module takes several times as long to get back into the cache.
    return to_json(document)


def decode_header(header: bytes | bytearray) -> tuple[Message, TensorSpecs]:
    """Read a message without its tensors, and what tensors follow; the opposite of `encode_header`.

    Raises:
        ValueError, LookupError: it is malformed.
    """
    document = from_json(header)
    work = [Work(*each) for each in document.get("work", ())]
    return Message(kind=Kind(document["kind"]), body=document["body"], work=work), document["tensors"]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def num_payload_bytes(specs: TensorSpecs) -> int:
    """Return the bytes of all tensors of a message."""
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in specs)


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


def byte_views(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return the bytes of host tensors as views, in order; a tensor that is not contiguous is copied first."""
    return [_bytes_of(tensor) for tensor in tensors.values() if tensor.numel()]


def _bytes_of(tensor: Tensor) -> memoryview:
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:  # not supported by numpy
        tensor = tensor.view(torch.int16)
    return tensor.numpy().data.cast("B")


def allocate(specs: TensorSpecs, *, pin_memory: bool = False) -> dict[str, Tensor]:
    """Allocate the tensors of a message; pinned host memory allows asynchronous copies to a GPU."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=pin_memory) for name, dtype, shape in specs
    }
