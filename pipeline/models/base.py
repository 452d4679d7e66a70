"""The interface between the pipeline and a model: encode, denoise and decode.

A rank requests the parts that it needs, and only those are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.costs import CostPrior
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Tensors

#: Frames to be written, on the host: (F, H, W, 3), uint8, RGB.
Frames = NDArray[np.uint8]


class Part(Flag):
    """The parts of a model; each rank loads only its own."""

    #: Image encoder and VAE encoder: rank 0.
    ENCODER = auto()
    #: UNet and scheduler: every rank.
    DENOISER = auto()
    #: VAE decoder: the last rank, and every other one that has room for it.
    DECODER = auto()

    @classmethod
    def of_rank(cls, rank: int) -> "Part":
        """Return the parts of a rank that has room for all of them."""
        return cls.DENOISER | cls.DECODER | (cls.ENCODER if rank == 0 else cls(0))


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The properties of a model, and its defaults for what a job leaves open."""

    #: The name or folder it was opened by, as in sidecars.
    name: str
    #: Notice to show with its videos, or "" for a trained model; e.g. "preview (no diffusion model)".
    notice: str
    #: Number of frames if a job has none.
    default_frames: int
    #: The dtype and the compute options that are not defaults, as in sidecars and checkpoints.
    compute: dict[str, Any] = field(default_factory=dict)
    #: Bytes of the weights loaded on this rank.
    weight_bytes: int = 0
    #: What encode and decode cost before they are measured; by default as on an H100 at 576x1024x25.
    prior: CostPrior = field(default_factory=lambda: CostPrior(encode_steps=0.18, decode_steps=4.4))


class Denoiser(Protocol):
    """The denoising of one sample: holds what is constant over its steps (scheduler, repeated conditioning)."""

    def step(self, latents: Tensor, index: int) -> Tensor:
        """Do step `index` (0 is the noisiest): latents (1, F, C, H/8, W/8) in, the same shape and dtype out.

        May modify latents that it has returned before in place, but not those of the first call.
        """
        ...


class VideoModel(Protocol):
    """A model with the requested parts."""

    @property
    def info(self) -> ModelInfo:
        """The properties of this model."""
        ...

    def warm_up(self, parameters: VideoParameters) -> None:
        """Run once with artificial tensors, so that the first sample of a shape does not pay for initialization."""
        ...

    def memory(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured bytes of `encode`, `step` and `decode` for a shape, besides weights."""
        ...

    def encode(self, photo: Image | None, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode a photo of exactly width x height and draw the initial noise; see `sample.Tensors`. ENCODER only.

        All random numbers of a video are drawn here, from one CPU generator seeded with `parameters.seed`:
        noise augmentation first, then latents.
        """
        ...

    def denoiser(self, tensors: Tensors, parameters: VideoParameters) -> Denoiser:
        """Prepare the denoising of one sample, from any step on."""
        ...

    def broken_weights(self) -> str:
        """Return the name of the first weight that is NaN or infinite, or ""; reads all weights."""
        ...

    def decode(self, tensors: Tensors, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode final latents, `decode_chunk_size` frames at a time. DECODER only.

        Returns:
            The frames on the model's device: (F, H, W, 3), uint8, RGB.

        Raises:
            SampleError: the frames are not finite.
        """
        ...


def nan_advice(model: VideoModel, dtype: torch.dtype) -> str:
    """Return the end of a sentence about NaN or infinite numbers: the cause, if it is a weight, and what to do.

    Args:
        model: the model that computed them.
        dtype: the dtype it computes in.
    """
    if weight := model.broken_weights():
        return f": the weights of {weight} are not finite; fetch the model {model.info.name} again."
    return "; try another seed, or float32 in place of float16." if dtype == torch.float16 else "; try another seed."
