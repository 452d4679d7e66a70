"""The toy model: a codec makes latents of a photo, which two small experts change, and makes frames of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from PIL.Image import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.models.compute.failures import in_a_sentence
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.lora_folder import LoraFolder
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role, State, VideoModel, all_finite, nan_advice
from svdq.pipeline.models.weights.components import ComponentLoader
from svdq.pipeline.models.weights.model_folder import read_json
from svdq.pipeline.planning.rounds import DECODER, ENCODERS
from svdq.pipeline.video_parameters import VideoParameters
from toy.family import BLOCK, COARSE, CODEC, FAMILY, FINE, LAYOUT, ToyParameters


class ToyExpert(nn.Module):
    """Mixes each latent with its neighbors and the photo's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2 * channels, channels, 3, padding=1)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(config["channels"])

    def forward(self, latents: Tensor, photo: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([latents, photo.expand_as(latents)], dim=1)))


class ToyCodec(nn.Module):
    """Turns pixels (N, 3, H, W) into latents (N, C, H/8, W/8), and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, channels, BLOCK, stride=BLOCK)
        self.decoder = nn.ConvTranspose2d(channels, 3, BLOCK, stride=BLOCK)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(config["channels"])


@dataclass(frozen=True)
class ToyDenoiser:
    """The denoising of one sample: the expert of each step and how often it passes over the latents."""

    experts: Mapping[str, nn.Module]  # those of this rank
    steps: Sequence[tuple[str, int]]

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        component, passes = self.steps[index]
        latents = state["latents"]
        for _ in range(passes):
            latents = (latents + self.experts[component](latents, state["photo"])) / 2
        return {"latents": latents}


class ToyModel(VideoModel):
    """The components of a toy's folder that a role needs."""

    def __init__(
        self,
        model: ResolvedModel,
        role: Role,
        device: torch.device,
        dtype: torch.dtype,
        options: ComputeOptions,
        _loras: LoraFolder,
    ) -> None:
        if unknown := options.changed().keys() - {"dtype"}:
            raise InputError(f"Models of Toy cannot be run with {', '.join(sorted(unknown))}; leave that out.")
        self._found = ComponentLoader(model=model, layout=LAYOUT, role=role, dtype=dtype)
        self._device, self._dtype = device, dtype
        self._of_set = {ENCODERS: [CODEC], COARSE: [COARSE], FINE: [FINE], DECODER: [CODEC]}
        self.sets = tuple(self._of_set) if role.in_rounds else ()
        self._parts = {} if role.in_rounds else {each: self._load(each) for each in self._found.needed()}
        num_bytes = sum(each.nbytes for part in self._parts.values() for each in part.parameters())
        self.info = self._found.info(FAMILY, options, weight_bytes=num_bytes)

    def _load(self, component: str) -> Any:
        with in_a_sentence(f"The {component} of the model {self._found.name}", self._device):
            config = read_json(self._found.path, f"{component}/config.json", self._found.name)
            part = self._found.class_of(component).from_config(config)
            part.load_state_dict({k: v for file in self._found.files(component) for k, v in load_file(file).items()})
            return part.to(self._device, self._dtype).eval()

    def hold(self, components: str) -> None:
        self._parts = {}
        self._parts = {each: self._load(each) for each in self._of_set[components]}

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        if parameters.loras:
            raise SampleError("Models of Toy take no LoRAs; leave them out.")
        return FAMILY.fill_in(parameters, self.info.name, self.info.facts)

    @torch.inference_mode()
    def encode(
        self, photo: Image | None, parameters: VideoParameters, last_photo: Image | None = None
    ) -> dict[str, Tensor]:
        """Return `photo` (1, C, H/8, W/8) and `latents` (F, C, H/8, W/8)."""
        assert isinstance(parameters, ToyParameters)
        pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None].to(self._device, self._dtype) / 127.5 - 1
        latents = self._parts[CODEC].encoder(pixels)
        generator = torch.Generator("cpu").manual_seed(parameters.seed)
        noise = torch.randn((parameters.num_frames, *latents.shape[1:]), generator=generator)
        return {"photo": latents, "latents": noise.to(self._device, self._dtype) * (1 + parameters.sparkle)}

    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> ToyDenoiser:
        segments = self.segments(parameters)
        steps = [(each.component, int(cost)) for each in segments for cost in each.costs or [1] * each.stop]
        return ToyDenoiser(self._parts, steps)

    @torch.inference_mode()
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        chunks = state["latents"].split(decode_chunk_size)
        video = torch.cat([self._parts[CODEC].decoder(chunk) for chunk in chunks]).float()
        if not all_finite([video]):
            raise SampleError(f"The decoded frames are not numbers (NaN or infinity){nan_advice(self)}")
        return ((video.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    @torch.inference_mode()
    def sound(self, state: State, parameters: VideoParameters) -> Tensor | None:
        """Return a hum (1, N) whose loudness in each frame follows its latents."""
        assert isinstance(parameters, ToyParameters)
        if not parameters.sound:
            return None
        loudness = state["latents"].float().mean((1, 2, 3)).tanh()
        loudness = loudness.repeat_interleave(self.info.sound_rate // parameters.fps)
        return (loudness * torch.sin(torch.arange(len(loudness), device=self._device) * 0.3))[None]
