"""Messages between ranks: a small JSON header and, for a sample, a payload with its tensors in sequence.

Messages contain no pickle or other executable data. A checkpoint is the same header and tensors in a safetensors file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from pydantic_core import from_json, to_json
from torch import Tensor

#: Bytes of a header, and of all tensors of a message, at most: a corrupt neighbor must not fill the memory. The
#: largest sample, 1024 frames of 4096x4096 in float32, has 8.6 GB.
MAX_HEADER_BYTES = 1 << 24
MAX_PAYLOAD_BYTES = 1 << 34
_MAX_DIMENSIONS = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
}


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
    """A piece of work that a rank has finished, as rank 0's planner counts it; a tuple, which is JSON already."""

    #: Who did it.
    rank: int
    #: `Sample.index`.
    sample: int
    #: `encode`, `steps` or `decode`.
    kind: str
    #: How long it took.
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


#: Name, dtype and shape of each tensor of a message, in order.
TensorSpecs = Sequence[tuple[str, str, Sequence[int]]]


def encode_header(message: Message) -> bytes:
    """Encode all of a message but the content of its tensors as JSON."""
    layout = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in message.tensors.items()
    ]
    document: dict[str, Any] = {"kind": message.kind.value, "body": message.body, "layout": layout}
    if message.work:
        document["work"] = message.work
    # pydantic's JSON encoder: after a sleep, the json module takes several times as long to get back into the cache.
    return to_json(document)


def decode_header(header: bytes | bytearray) -> tuple[Message, TensorSpecs]:
    """Read a message without its tensors, and what tensors follow; the opposite of `encode_header`.

    Raises:
        ValueError: it is malformed, or announces more than `MAX_PAYLOAD_BYTES`.
    """
    try:
        document = from_json(header)
        kind, body, layout = Kind(document["kind"]), document["body"], document["layout"]
        work = [_work(*each) for each in document.get("work", ())]
        num_bytes = num_payload_bytes(layout)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a message: {error!r}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body of a {kind.value} message is not an object")
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"the tensors of a {kind.value} message have {num_bytes:,} bytes")
    return Message(kind=kind, body=body, work=work), layout


def _work(rank: object, sample: object, kind: object, seconds: object) -> Work:
    """Check a piece of finished work.

    Raises:
        ValueError: it is not one.
    """
    if not (type(rank) is type(sample) is int and isinstance(kind, str) and type(seconds) in (int, float)):
        raise ValueError("the work of a message is not work")
    return Work(rank, sample, kind, seconds)  # type: ignore[arg-type]


def num_payload_bytes(layout: TensorSpecs) -> int:
    """Return the bytes of all tensors of a layout."""
    return sum(_num_bytes(*tensor) for tensor in layout)


def _num_bytes(name: object, dtype: str, shape: Sequence[int]) -> int:
    """Give the bytes of a tensor that a header announces.

    Raises:
        KeyError: there is no such dtype.
        ValueError: it has no name, or its shape is not one.
    """
    sides = isinstance(shape, list) and all(type(side) is int and 0 <= side <= MAX_PAYLOAD_BYTES for side in shape)
    if not isinstance(name, str) or not sides or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor has no name, or its shape is not one")
    return _DTYPES[dtype].itemsize * math.prod(shape)


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


def allocate(layout: TensorSpecs, device: torch.device, *, pin_memory: bool = False) -> dict[str, Tensor]:
    """Allocate the tensors of a message; pinned host memory allows asynchronous copies to a GPU."""
    return {
        name: torch.empty(shape, dtype=_DTYPES[dtype], device=device, pin_memory=pin_memory)
        for name, dtype, shape in layout
    }
