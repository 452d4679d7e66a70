"""The interface between the pipeline and a model, of which a rank loads what its role needs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.models.compute.memory import Leaves
from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import VideoParameters

Frames = NDArray[np.uint8]  # frames to be written, on the host: (F, H, W, 3), uint8, RGB
#: All of a sample at a step boundary: tensors by name, on one device. Only the family of the model depends on their
#: names, number, shapes and dtypes.
State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Role:
    """The work of a rank, and so the components of a model that it loads."""

    embed: bool = False  # whether it encodes prompts: rank 0
    encode: bool = False  # whether it has the encoders of photos: rank 0, and every other one that has room for them
    components: frozenset[str] | None = None  # denoising ones that it has, such as `unet`; None: all
    decode: bool = False  # whether it has the decoder: the last rank, and every other one that has room for it
    in_rounds: bool = False  # whether it works in rounds and so holds one set of these at a time
    leaves: Leaves = "nothing"  # what else leaves the device while it is not in use
    host_bytes: int = 0  # of host memory for components that are not on the device

    @classmethod
    def of_rank(cls, rank: int) -> Self:
        """Return the role of a rank that has room for everything."""
        return cls(embed=rank == 0, encode=True, decode=True)

    def has(self, component: str) -> bool:
        """Whether it has a denoising component."""
        return self.components is None or component in self.components

    def __str__(self) -> str:
        if self.in_rounds:
            return "in rounds"
        components = "all steps" if self.components is None else ", ".join(sorted(self.components))
        return ", ".join(filter(None, ["encode" * self.encode, components, "decode" * self.decode]))


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The properties of an opened model."""

    name: str  # the name or folder it was opened by, as in sidecars
    notice: str  # notice to show with its videos, or "" for a trained model; e.g. "preview (no diffusion model)".
    family: Family | None = None  # the family whose videos it makes; None: any
    facts: Facts = field(default_factory=dict)  # what its folder says; empty for a model without one
    compute: dict[str, Any] = field(default_factory=dict)  # dtype and other compute options, as in sidecars
    made_of: dict[str, Any] = field(default_factory=dict)  # what a model file put into the folder, as in sidecars
    identity: str = ""  # names the model in checkpoints: of a model file, its fingerprint in `compute` is enough
    sound_rate: int = 0  # samples a second of the sound of its videos; 0: they have none
    weight_bytes: int = 0  # that the device holds
    streamed_bytes: int = 0  # the same if blocks were streamed from host memory
    #: What encode and decode cost before they are measured.
    prior: CostPrior = field(default_factory=lambda: CostPrior(encode_steps=0.18, decode_steps=4.4))

    @property
    def known(self) -> KnownModel | None:
        """The model as it is known without being opened; None if it is of no one family."""
        return None if self.family is None else KnownModel(name=self.name, family=self.family, facts=self.facts)


class Denoiser(Protocol):
    """The denoising of one sample: holds what is constant over its steps (scheduler, repeated conditioning)."""

    def step(self, state: State, index: int) -> State:
        """Do step `index` (0 is the noisiest) and return the tensors that changed, with the device that they had.

        May modify tensors that it has returned before in place, but not those that the denoiser was made with. A step
        that runs out of memory has modified nothing, and can be done again.
        """
        ...


class VideoModel(ABC):
    """A model opened for a role."""

    info: ModelInfo
    sets: Sequence[str] = ()  # of components held one at a time, in the order of units; only in rounds
    decoded: Sequence[str] = ("latents",)  # tensors of a state that `decode` and `sound` need

    @abstractmethod
    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in what a job leaves open; raises InputError if this model cannot make such a video.

        SampleError if it cannot apply one of its LoRAs.
        """

    def segments(self, parameters: VideoParameters) -> tuple[Segment, ...]:
        """Return which component does which steps of a video; a model of no one family has its own."""
        assert self.info.known is not None
        return self.info.known.unit_costs(parameters).segments

    def warm_up(self, parameters: VideoParameters) -> None:  # noqa: B027 - some models need none
        """Run once with artificial tensors, so that the first sample of a shape does not pay for initialization."""

    def memory(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured bytes of `encode`, `step` and `decode` for a shape, besides weights."""
        return {}

    def broken_weights(self) -> str:
        """Return the name of the first weight that is NaN or infinite, or ""; reads all weights."""
        return ""

    def hold(self, components: str) -> None:  # noqa: B027 - most hold all
        """Load a set of components in place of the one before; raises InputError if it cannot be loaded."""

    def lacks(self, components: str) -> bool:
        """Return whether a set must be loaded before it is used, outside of rounds."""
        return False

    def embed(self, parameters: VideoParameters) -> State | None:
        """Encode the prompts, if any, with `Role.embed`, on any thread; None: no text encoder, and not known."""
        return {}

    @abstractmethod
    def encode(self, photo: Image | None, parameters: VideoParameters, last_photo: Image | None = None) -> State:
        """Encode photos of exactly width x height, of the first and last frame; only with `Role.encode`.

        With `Role.embed` the prompts, too. All random numbers of a video are drawn here, from one CPU generator seeded
        with `parameters.seed`, in the order of diffusers.
        """

    @abstractmethod
    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> Denoiser:
        """Prepare the denoising of one sample, from any step on that this rank has the component for.

        It skips the steps whose relative cost in `step_costs` is 0, as the segments have it; none: each costs 1.
        """

    def picture(self, denoiser: Denoiser) -> Tensor | None:
        """Draw some frames (F, h, w, 3), uint8, RGB, of what the last step of a denoiser leads to; None without one.

        Another thread calls it while the denoiser goes on, so it may be wrong, and may raise anything.
        """
        return None

    @abstractmethod
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode a state after the last step, `decode_chunk_size` frames at a time; only with `Role.decode`.

        Returns frames on the device: (F, H, W, 3), uint8, RGB. Raises SampleError if they are not finite.
        """

    def sound(self, state: State, parameters: VideoParameters) -> Tensor | None:
        """Decode the sound of a state after the last step: a waveform (channels, N), float32, -1 to 1; None: no sound.

        Only with `Role.decode`; it has `ModelInfo.sound_rate` samples a second. Raises SampleError if it is not finite.
        """
        return None


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor has NaN or infinity: aminmax propagates NaN and costs a tenth of a mask."""
    extremes = (
        torch.stack(torch.aminmax(each.detach())) for each in tensors if each.is_floating_point() and each.numel()
    )
    return all(bool(torch.isfinite(each).all()) for each in extremes)


def nan_advice(model: VideoModel) -> str:
    """Return the end of a sentence about NaN or infinite numbers: the cause, if it is a weight, and what to do."""
    if weight := model.broken_weights():
        return f": the weights of {weight} are not finite; fetch the model {model.info.name} again."
    in_half = model.info.compute.get("dtype") == "float16"
    return "; try another seed, or float32 in place of float16." if in_half else "; try another seed."
