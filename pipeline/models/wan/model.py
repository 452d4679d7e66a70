"""Wan through diffusers: the arithmetic of WanImageToVideoPipeline, split into encode, steps and decode.

It calls the pipeline's own methods wherever possible, so that results equal diffusers' bit by bit; comments refer to
the lines of its `__call__` that the rest repeats. Never uses the network.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.base import ModelInfo, Role, State, nan_advice, random_like
from svdq.pipeline.models.components import first_not_finite
from svdq.pipeline.models.device_memory import MemoryMeter
from svdq.pipeline.models.family import Segment
from svdq.pipeline.models.load_errors import in_a_sentence
from svdq.pipeline.models.memory import shape_for
from svdq.pipeline.models.options import DEFAULTS, ComputeOptions, apply, weight_bytes
from svdq.pipeline.models.pixels import to_uint8
from svdq.pipeline.models.untrained import is_untrained
from svdq.pipeline.models.wan import schedule
from svdq.pipeline.models.wan.denoiser import WanDenoiser
from svdq.pipeline.models.wan.family import FAMILY, boundary_timestep
from svdq.pipeline.models.wan.folder import WanFolder
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.models.wan.schedule import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.scheduling import Schedule, first_frame_mask, history_names
from svdq.pipeline.models.wan.state import MAX_TOKENS, check, padded, zeros
from svdq.pipeline.parameters import VideoParameters

logger = logging.getLogger(__name__)

#: Number of texts whose embeddings are kept. Each has at most 4 MB in half precision.
CACHED_TEXTS = 64
#: Number of schedules that are kept.
CACHED_SCHEDULES = 256


class WanModel:
    """Any image-to-video model of Wan: a diffusers folder, or a hub id whose files are in the hub's cache."""

    def __init__(
        self,
        name: str,
        role: Role,
        device: torch.device,
        dtype: torch.dtype,
        options: ComputeOptions = DEFAULTS,
    ) -> None:
        """Load the components that a role needs, in `dtype`, which overrides that of the options.

        Raises:
            InputError: the model does not exist, or a component is missing, broken or of another class.
        """
        started = time.perf_counter()
        folder = WanFolder.find(name, role, dtype)
        self._facts = FAMILY.read_facts(folder.path, name)
        self._role = role
        self._device = device
        self._dtype = dtype
        self._options = options
        # Quantized weights may fit where full ones do not, so they are moved to the GPU layer by layer.
        on_host = "int8" in options.approximate and device.type != "cpu"
        self._pipeline = folder.load_pipeline(role, dtype, device, experts_on_host=on_host)
        self._transformers = {
            each: getattr(self._pipeline, each)
            for each in (HIGH_NOISE, LOW_NOISE)
            if getattr(self._pipeline, each) is not None
        }
        for each, transformer in self._transformers.items():
            with in_a_sentence(f"The {each} of the model {name}", device):
                apply(transformer, options, device)
                if on_host:
                    transformer.to(device)
        self._meter = MemoryMeter.of(device)
        #: By number of steps and shift.
        self._schedules: dict[tuple[int, float], Schedule] = {}
        #: The embeddings of prompts, the least recently used first.
        self._embeddings: OrderedDict[str, Tensor] = OrderedDict()
        notices = ["tiny (untrained: shows noise)"] if is_untrained(folder.path) else []
        notices += [f"approximate ({way})" for way in options.approximate]
        self._info = ModelInfo(
            name=name,
            notice=", ".join(notices),
            family=FAMILY,
            facts=self._facts,
            prior=FAMILY.prior(self._facts),
            weight_bytes=sum(map(weight_bytes, self._modules())),
            compute=options.changed() | {"dtype": str(dtype).removeprefix("torch.")},
        )
        logger.info("Loaded %s (%s) in %.1f s.", name, role, time.perf_counter() - started)

    @property
    def info(self) -> ModelInfo:
        """The properties of this model."""
        return self._info

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline with the components of the role."""
        return self._pipeline

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in what a job leaves open with the authors' defaults; see `VideoModel`."""
        return FAMILY.fill_in(parameters, self._info.name, self._facts)

    def segments(self, parameters: VideoParameters) -> tuple[Segment, ...]:
        """Return which expert does which steps of a video."""
        return schedule.segments(self._schedule(parameters).components)

    def check_state(self, state: State, parameters: VideoParameters) -> None:
        """Check the tensors of a state; see `VideoModel`."""
        check(state, parameters, self._facts, self._info.compute["dtype"], history_names(self._pipeline.scheduler))

    def memory(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured memory of parts on this rank's GPU for a shape; see `VideoModel`."""
        return self._meter.measured(parameters)

    def broken_weights(self) -> str:
        """Return the name of the first weight that is not finite; see `VideoModel`."""
        return first_not_finite(self._pipeline)

    def _modules(self) -> list[torch.nn.Module]:
        return [item for item in self._pipeline.components.values() if isinstance(item, torch.nn.Module)]

    def warm_up(self, parameters: VideoParameters) -> None:
        """Run each part once on a gray photo, so that the first video does not wait for compiling and kernel selection.

        Each expert of this rank does one of its own steps. On a CPU only compiling is worth a step.
        """
        on_cpu = self._device.type == "cpu"
        if on_cpu and self._options.compiled == "off":
            return
        if self._role.encode and not on_cpu:
            self.encode(PIL.Image.new("RGB", (parameters.width, parameters.height), "gray"), parameters)
        state = self._zeros(parameters)
        for segment in self.segments(parameters):
            if segment.component in self._transformers:
                self.denoiser(state, parameters).step(state, segment.start)
        if self._role.decode and not on_cpu:
            self.decode(state, parameters, parameters.decode_chunk_size or parameters.num_frames)

    def _zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros, with all that the scheduler may keep."""
        return zeros(parameters, self._facts, self._dtype, history_names(self._pipeline.scheduler), self._device)

    def random_state(self, parameters: VideoParameters, index: int) -> dict[str, Tensor]:
        """Draw a state, which has the same size of numbers before every step; see `FolderModel`."""
        return random_like(self._zeros(parameters), parameters.seed)

    @torch.inference_mode()
    def encode(self, photo: PIL.Image.Image | None, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode the prompts and a photo of exactly width x height, and draw the initial noise.

        Returns:
            `latents` (1, C, F', H', W') and `condition` (1, 4 + C, F', H', W'), or (1, C, 1, H', W') of a TI2V model,
            in float32; `prompt_embeds` (1, N, E), with guidance `negative_prompt_embeds`, and for a 2.1 model
            `image_embeds` (1, 257, C). N is without the padding to 512 tokens, which the denoiser adds.
        """
        assert self._role.encode
        assert photo is not None
        assert photo.size == (parameters.width, parameters.height)
        with self._meter.measuring("encode", shape_for("encode", parameters)):
            return self._encode(photo, parameters)

    def _encode(self, photo: PIL.Image.Image, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode; see `encode`."""
        assert isinstance(parameters, WanParameters)
        pipeline = self._pipeline
        # (3)
        state = {"prompt_embeds": self._embed(parameters.prompt)}
        if parameters.guided:
            assert parameters.negative_prompt is not None
            # A copy, because both texts may be the same, and safetensors refuses tensors that share memory.
            state["negative_prompt_embeds"] = self._embed(parameters.negative_prompt).clone()
        if self._facts["has_image_encoder"]:
            state["image_embeds"] = pipeline.encode_image(photo, self._device).to(self._dtype)
        # (5) The noise is the only random thing.
        size = {"height": parameters.height, "width": parameters.width}
        image = pipeline.video_processor.preprocess(photo, **size).to(self._device, dtype=torch.float32)
        latents, condition = pipeline.prepare_latents(
            image,
            batch_size=1,
            num_channels_latents=pipeline.vae.config.z_dim,
            **size,
            num_frames=parameters.num_frames,
            dtype=torch.float32,
            device=self._device,
            generator=torch.Generator("cpu").manual_seed(parameters.seed),
        )[:2]
        return {**state, "latents": latents, "condition": condition}

    def _embed(self, text: str) -> Tensor:
        """Return the embedding of a text (1, N, E) without padding, which is zeros."""
        embedding = self._embeddings.pop(text, None)
        if embedding is None:
            padded = self._pipeline._get_t5_prompt_embeds(text, max_sequence_length=MAX_TOKENS, device=self._device)
            is_text = padded[0].ne(0).any(dim=1).nonzero()
            embedding = padded[:, : int(is_text.max()) + 1].to(self._dtype).clone()
        self._embeddings[text] = embedding
        if len(self._embeddings) > CACHED_TEXTS:
            self._embeddings.popitem(last=False)
        return embedding

    @torch.inference_mode()
    def denoiser(self, state: State, parameters: VideoParameters) -> WanDenoiser:
        """Prepare the denoising of one sample, from any step on that this rank has the expert for."""
        assert isinstance(parameters, WanParameters)
        measured = self._meter.begin("step", shape_for("step", parameters))
        scale, scale_2 = parameters.guidance_scale, parameters.guidance_scale_2
        assert scale is not None
        return WanDenoiser(
            transformers=self._transformers,
            schedule=self._schedule(parameters),
            prompt_embeds=padded(state["prompt_embeds"]),
            negative_prompt_embeds=padded(state["negative_prompt_embeds"]) if parameters.guided else None,
            image_embeds=state.get("image_embeds"),
            condition=state["condition"],
            first_frame_mask=first_frame_mask(state["latents"]) if self._facts["expand_timesteps"] else None,
            guidance_scales={HIGH_NOISE: scale, LOW_NOISE: scale if scale_2 is None else scale_2},
            dtype=self._dtype,
            measured=measured,
        )

    def _schedule(self, parameters: VideoParameters) -> Schedule:
        """Return the schedule for a number of steps and a shift; setting timesteps waits for the device."""
        assert isinstance(parameters, WanParameters)
        assert parameters.steps is not None
        assert parameters.flow_shift is not None
        key = (parameters.steps, parameters.flow_shift)
        if key not in self._schedules:
            if len(self._schedules) >= CACHED_SCHEDULES:
                self._schedules.clear()
            own = self._pipeline.scheduler
            setting = schedule.SHIFT_SETTINGS[type(own).__name__]
            scheduler = type(own).from_config(own.config, **{setting: parameters.flow_shift})
            # (4)
            scheduler.set_timesteps(parameters.steps, device=self._device)
            self._schedules[key] = Schedule(scheduler, boundary_timestep(self._facts), HIGH_NOISE, LOW_NOISE)
        return self._schedules[key]

    @torch.inference_mode()
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode a state after the last step; return frames (F, H, W, 3), uint8.

        A `decode_chunk_size` below the number of frames decodes in tiles, which takes less memory and changes pixels.

        Raises:
            SampleError: the frames are not finite.
        """
        assert self._role.decode
        vae = self._pipeline.vae
        as_decoded = parameters.model_copy(update={"decode_chunk_size": decode_chunk_size})
        with self._meter.measuring("decode", shape_for("decode", as_decoded)):
            latents = state["latents"]
            if self._facts["expand_timesteps"]:
                mask = first_frame_mask(latents)
                latents = (1 - mask) * state["condition"] + mask * latents
            latents = latents.to(vae.dtype)
            mean, std = (
                torch.tensor(vae.config[name]).view(1, vae.config.z_dim, 1, 1, 1)
                for name in ("latents_mean", "latents_std")
            )
            latents_std = 1.0 / std.to(latents.device, latents.dtype)
            latents = latents / latents_std + mean.to(latents.device, latents.dtype)
            vae.use_tiling = decode_chunk_size < parameters.num_frames
            frames = vae.decode(latents, return_dict=False)[0]
            if not torch.isfinite(frames).all():
                raise SampleError(f"The decoded frames are not numbers (NaN or infinity){nan_advice(self)}")
            return to_uint8(frames[0])
