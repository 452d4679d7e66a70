"""What ranks say to each other: a small JSON header, and for a sample a payload with its tensors side by side.

Nothing executable travels: no pickle. A checkpoint is the same header and tensors in a safetensors file. Knows nothing
of sockets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Resumption, Sample

#: Tensors start at multiples of this in a payload, so that they can be viewed in place whatever their dtype.
_ALIGNMENT = 16

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


class Kind(Enum):
    """What a message is."""

    #: A video on its way.
    SAMPLE = "sample"
    #: A shape of video that will come: be ready for it.
    WARM = "warm"
    #: No more messages will come.
    CLOSE = "close"
    #: From the last rank to rank 0: how a video ended.
    REPORT = "report"


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of any kind."""

    kind: Kind
    #: JSON of what is said; empty for a close.
    body: Mapping[str, Any] = field(default_factory=dict)
    #: For a sample its tensors.
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


#: Name, dtype and shape of each tensor of a payload, in order.
Layout = Sequence[tuple[str, str, Sequence[int]]]


def sample_body(sample: Sample) -> dict[str, Any]:
    """Write everything of a sample but its tensors as JSON."""
    return {
        "job_id": sample.job_id,
        "parameters": sample.parameters.model_dump(mode="json"),
        "boundaries": list(sample.boundaries),
        "step": sample.step,
        "ticket": dict(sample.ticket),
        "failure": sample.failure,
        "cancelled": sample.cancelled,
        "stages": [list(stage) for stage in sample.stages],
        "seconds": dict(sample.seconds),
        "resumed": [asdict(resumption) for resumption in sample.resumed],
    }


def sample_from(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Sample:
    """Read a sample from its JSON and tensors; the opposite of `sample_body`.

    Raises:
        ValueError: the JSON is not a sample's (pydantic's ValidationError is one).
    """
    try:
        return Sample(
            job_id=body["job_id"],
            parameters=VideoParameters.model_validate(body["parameters"]),
            boundaries=tuple(body["boundaries"]),
            step=body["step"],
            tensors=tensors,
            ticket=body["ticket"],
            failure=body["failure"],
            cancelled=body["cancelled"],
            stages=tuple((rank, num_steps, seconds) for rank, num_steps, seconds in body["stages"]),
            seconds=body["seconds"],
            resumed=tuple(Resumption(**resumption) for resumption in body["resumed"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not a sample: {error!r}") from error


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Describe the tensors of a payload."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]


def _span(dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
    """Bytes of a tensor, and bytes that it takes in a payload."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    return num_bytes, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def payload_bytes(layout: Layout) -> int:
    """Bytes of the payload that a layout describes."""
    return sum(_span(_DTYPES[dtype], shape)[1] for _, dtype, shape in layout)


def byte_views(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """View the bytes of tensors, on the host and in order; a tensor that is not contiguous is copied first."""
    return [_bytes_of(tensor) for tensor in tensors.values() if tensor.numel()]


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    # As bytes first: numpy has no bfloat16.
    return tensor.view(-1).view(torch.uint8).numpy().data


def unpack(layout: Layout, payload: Tensor) -> dict[str, Tensor]:
    """View the tensors of a payload in place."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, dtype_name, shape in layout:
        dtype = _DTYPES[dtype_name]
        num_bytes, span = _span(dtype, shape)
        tensors[name] = payload[start : start + num_bytes].view(dtype).view(list(shape))
        start += span
    return tensors
