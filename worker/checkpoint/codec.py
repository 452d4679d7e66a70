"""A checkpoint as bytes: a sample in a safetensors file. Refuses a checkpoint that would not give the same bits.

The tensors are stored unchanged. The metadata is JSON: the sample without its tensors, a checksum of the tensors, and
the model, the kind of device and the compute options, all of which decide the bits. Everything in a file is checked,
since anyone who can write to the storage may have made it.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError

from svdq.pipeline.loop.sample import Resumption, Sample, sample_body
from svdq.pipeline.models.base import State
from svdq.pipeline.models.family_parameters import AnyParameters
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.transport.message import byte_views

#: The dtypes of samples.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Sample(_Record):
    """What `message.sample_body` writes of a sample that has not ended."""

    job_id: str
    index: NonNegativeInt
    parameters: AnyParameters
    boundaries: tuple[NonNegativeInt, ...]
    decoder: NonNegativeInt
    step: NonNegativeInt
    metadata: dict[str, Any]
    failure: None
    canceled: Literal[False]
    stages: tuple[tuple[NonNegativeInt, NonNegativeInt, NonNegativeFloat], ...]
    seconds: dict[str, NonNegativeFloat]
    memory: dict[str, NonNegativeInt]
    chunk_chosen: bool
    ran_out: bool
    resumed: tuple[Resumption, ...]


class _Metadata(_Record):
    model: str
    device: str
    compute: dict[str, Any]
    sample: _Sample
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Writes samples as bytes and reads them back."""

    #: The model's name.
    model: str
    #: Where decoded tensors go.
    device: torch.device
    #: How the model computes: `ModelInfo.compute`.
    compute: dict[str, Any] = field(default_factory=dict)
    #: Raises ValueError if tensors are no state of a video: `VideoModel.check_state`.
    check_state: Callable[[State, VideoParameters], None] = lambda state, parameters: None

    def encode(self, sample: Sample) -> bytes:
        """Write a sample; its tensors are copied to the host."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sample.tensors.items()}
        how = {"model": self.model, "device": self.device.type, "compute": self.compute}
        metadata = how | {"sample": sample_body(sample), "crc32": _checksum(tensors)}
        return safetensors.torch.save(tensors, {"svdq": json.dumps(metadata, allow_nan=False)})

    def decode(self, data: bytes, job_id: str, parameters: VideoParameters) -> Sample:
        """Read a sample of a job.

        Raises:
            ValueError: it is not one, or was made by another model, with other parameters or in another way.
        """
        try:
            length = int.from_bytes(data[:8], "little")
            header = from_json(data[8 : 8 + length])
            metadata = _Metadata.model_validate_json(header["__metadata__"]["svdq"])
            tensors = safetensors.torch.load(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"it is not a checkpoint: {where}: {first['msg']}") from error
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"it is not a checkpoint: {error!r}") from error
        sample = Sample(**dict(metadata.sample), tensors=tensors)
        # The decode_chunk_size that was chosen at the start of the video stays.
        ours = {"decode_chunk_size": sample.parameters.decode_chunk_size}
        made_with = (metadata.model, metadata.device, sample.job_id, sample.parameters)
        if made_with != (self.model, self.device.type, job_id, parameters.model_copy(update=ours)):
            raise ValueError("it was made by another model, with other parameters or on another kind of device")
        if metadata.compute != self.compute:
            raise ValueError(f"it was computed with {_words(metadata.compute)}, and now it is {_words(self.compute)}")
        if sample.step > parameters.steps:
            raise ValueError(f"it is at step {sample.step} of {parameters.steps}")
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"its {name} are {tensor.dtype}")
        if _checksum(tensors) != metadata.crc32:
            raise ValueError("its checksum is wrong")
        self.check_state(tensors, sample.parameters)
        return Sample(**{**vars(sample), "tensors": {name: each.to(self.device) for name, each in tensors.items()}})


def _checksum(tensors: State) -> int:
    """Return the CRC-32 of host tensors in the order of their names."""
    checksum = 0
    for view in byte_views(dict(sorted(tensors.items()))):
        checksum = zlib.crc32(view, checksum)
    return checksum


def _words(compute: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in compute.items()) or "no options"
