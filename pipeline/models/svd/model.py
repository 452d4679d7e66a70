"""Stable Video Diffusion through diffusers: the arithmetic of StableVideoDiffusionPipeline, split into parts.

It calls the pipeline's own methods wherever possible, so that results equal diffusers' bit by bit; comments refer to
the lines of its `__call__` that the rest repeats. Never uses the network.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.diffusers_model import DiffusersModel
from svdq.pipeline.models.latent_rgb import rgb_of_latents, some_frames
from svdq.pipeline.models.svd.family import FAMILY, SvdParameters
from svdq.pipeline.models.video_model import Denoiser, State
from svdq.pipeline.video_parameters import VideoParameters


@dataclass(kw_only=True)
class SvdDenoiser:
    """The denoising of one sample: (9) of diffusers' `__call__`. B is 2 with guidance and 1 without."""

    #: Returns the UNetSpatioTemporalConditionModel with the LoRAs of this sample; all share it.
    unet: Callable[[], Any]
    scheduler: Any  # EulerDiscreteScheduler of this sample alone: it counts steps
    image_embedding: Tensor  # (B, 1, E)
    image_latents: Tensor  # (B, F, 4, H/8, W/8)
    added_time_ids: Tensor  # (B, 3): fps - 1, motion_bucket_id, noise_aug_strength
    guidance_scale: Tensor  # (1, F, 1, 1, 1)
    guided: bool
    expected: Tensor | None = None  # the latents (1, F, 4, H/8, W/8) of the whole video by the last prediction
    measured: Callable[[], None] = lambda: None  # called at the end of a step, which ends the measurement of its memory

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, F, 4, H/8, W/8)."""
        latents = state["latents"]
        scheduler = self.scheduler
        if scheduler.step_index != index:
            # The first step of this range: the scheduler continues counting from here.
            scheduler.set_begin_index(index)
            scheduler._step_index = None
        timestep = scheduler.timesteps[index]
        model_input = torch.cat([latents] * 2) if self.guided else latents
        model_input = scheduler.scale_model_input(model_input, timestep)
        # Concatenated over channels: (B, F, 8, H/8, W/8)
        model_input = torch.cat([model_input, self.image_latents], dim=2)
        noise_pred = self.unet()(
            model_input,
            timestep,
            encoder_hidden_states=self.image_embedding,
            added_time_ids=self.added_time_ids,
            return_dict=False,
        )[0]
        if self.guided:
            unconditional, conditional = noise_pred.chunk(2)
            noise_pred = unconditional + self.guidance_scale * (conditional - unconditional)
        previous: Tensor
        previous, self.expected = scheduler.step(noise_pred, timestep, latents, return_dict=False)
        self.measured()
        return {"latents": previous}


class SvdModel(DiffusersModel):
    """Any StableVideoDiffusionPipeline."""

    family = FAMILY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A scheduler for each number of steps: setting timesteps reads every sigma back from the device.
        self._schedule = cache(self._set_timesteps)

    def zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros; see `_encode` for its tensors."""
        picture = (parameters.height // 8, parameters.width // 8)
        shapes = {
            "image_embedding": (1, 1, self._facts["cross_attention_dim"]),
            "image_latents": (1, 4, *picture),
            "latents": (1, parameters.num_frames, 4, *picture),
        }
        return {name: torch.zeros(shape, device=self._device, dtype=self._dtype) for name, shape in shapes.items()}

    def _encode(
        self, photo: PIL.Image.Image, parameters: VideoParameters, _last_photo: PIL.Image.Image | None
    ) -> dict[str, Tensor]:
        """Return `image_embedding`, `image_latents` and `latents`, without the zeros that guidance adds."""
        from diffusers.utils.torch_utils import randn_tensor

        assert isinstance(parameters, SvdParameters)
        pipeline = self.pipeline
        generator = torch.Generator("cpu").manual_seed(parameters.seed)
        # (3) A PIL image, because CLIP's antialiased resize is skipped for tensors.
        image_embedding = pipeline._encode_image(photo, self._device, 1, do_classifier_free_guidance=False)
        # (4) Noise augmentation comes first from the generator, in the preprocessed image's float32.
        image = pipeline.video_processor.preprocess(photo, height=parameters.height, width=parameters.width)
        image = image.to(self._device)
        noise = randn_tensor(image.shape, generator=generator, device=self._device, dtype=image.dtype)
        image = image + parameters.noise_aug_strength * noise
        needs_upcasting = pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast
        try:
            if needs_upcasting:
                pipeline.vae.to(dtype=torch.float32)
            image_latents = pipeline._encode_vae_image(image, self._device, 1, do_classifier_free_guidance=False)
        finally:
            # Also after an out-of-memory error, for later decodes.
            if needs_upcasting:
                pipeline.vae.to(dtype=torch.float16)
        # (6), (7) Only this method uses the pipeline's own scheduler: the noise is scaled by its largest sigma.
        pipeline.scheduler.set_timesteps(parameters.steps, device=self._device)
        if (num_steps := len(pipeline.scheduler.timesteps)) != parameters.steps:
            # With some settings, such as trailing timesteps without Karras's sigmas; diffusers then does all of them.
            raise SampleError(
                f"The scheduler of the model {self.info.name} makes {num_steps} steps of {parameters.steps}; submit "
                "the photo again with another number of steps."
            )
        latents = pipeline.prepare_latents(
            1,
            parameters.num_frames,
            8,  # the UNet's in_channels; half of them are the photo's
            parameters.height,
            parameters.width,
            image_embedding.dtype,
            self._device,
            generator,
        )
        return {
            "image_embedding": image_embedding,
            "image_latents": image_latents.to(image_embedding.dtype),
            "latents": latents,
        }

    @torch.inference_mode()
    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> SvdDenoiser:
        """Prepare the denoising of one sample from any step on; no other sample shares its scheduler."""
        assert isinstance(parameters, SvdParameters)
        measured = self._measure_step(parameters)
        # (3), (4) With guidance the batch is [unconditional: zeros, conditional].
        image_embedding = state["image_embedding"]  # (1, 1, E)
        image_latents = state["image_latents"]  # (1, 4, H/8, W/8)
        if parameters.guided:
            image_embedding = torch.cat([torch.zeros_like(image_embedding), image_embedding])
            image_latents = torch.cat([torch.zeros_like(image_latents), image_latents])
        else:
            # Created here like all other tensors: the compiler treats received tensors as another kind.
            image_embedding = image_embedding.clone()
        dtype = image_embedding.dtype
        # (5) Stable Video Diffusion was conditioned on fps - 1.
        added_time_ids = self.pipeline._get_add_time_ids(
            parameters.fps - 1,
            parameters.motion_bucket_id,
            parameters.noise_aug_strength,
            dtype,
            1,
            1,
            parameters.guided,
        )
        # (8) The scale rises from the first frame to the last.
        guidance_scale = torch.linspace(
            parameters.min_guidance_scale, parameters.max_guidance_scale, parameters.num_frames
        )
        return SvdDenoiser(
            unet=partial(self._denoiser_for, parameters, "unet"),
            # With its own counter; those with the same number of steps share their constant tables.
            scheduler=copy.copy(self._schedule(parameters.steps)),
            image_embedding=image_embedding,
            image_latents=image_latents.unsqueeze(1).repeat(1, parameters.num_frames, 1, 1, 1),
            added_time_ids=added_time_ids.to(self._device),
            guidance_scale=guidance_scale.to(self._device, dtype)[None, :, None, None, None],
            guided=parameters.guided,
            measured=measured,
        )

    @torch.inference_mode()
    def picture(self, denoiser: Denoiser) -> Tensor | None:
        assert isinstance(denoiser, SvdDenoiser)
        expected = denoiser.expected
        return None if expected is None else rgb_of_latents(some_frames(expected[0]))

    def _set_timesteps(self, steps: int) -> Any:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps, device=self._device)
        return scheduler

    def _decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        video: Tensor = self.pipeline.decode_latents(state["latents"], parameters.num_frames, decode_chunk_size)
        return video[0]
