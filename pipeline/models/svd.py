"""Stable Video Diffusion through diffusers: the arithmetic is StableVideoDiffusionPipeline's own, cut into parts.

Wherever possible its methods are called rather than written again, so that the bits are diffusers' own; the comments
name the lines of its `__call__` that the rest repeats. Knows nothing of ranks, and touches no network.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.model import Frames, ModelInfo, Part
from svdq.pipeline.models.model_index import UNET_DEFAULTS, is_untrained
from svdq.pipeline.models.svd_folder import SvdFolder
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Tensors

logger = logging.getLogger(__name__)


class SvdModel:
    """Any StableVideoDiffusionPipeline: a diffusers folder, or a hub id whose files are in the hub's cache."""

    def __init__(self, name: str, parts: Part, device: torch.device, dtype: torch.dtype) -> None:
        """Load the components that `parts` need.

        Raises:
            InputError: there is no such model, or a component is missing, broken or of another class.
        """
        started = time.perf_counter()
        folder = SvdFolder.find(name, dtype)
        self._parts = parts
        self._device = device
        self._dtype = dtype
        self._pipeline = folder.load_pipeline(parts, dtype, device)
        self._unet_config = UNET_DEFAULTS | folder.config("unet")
        self._info = ModelInfo(
            name=name,
            notice="tiny (untrained: shows noise)" if is_untrained(folder.path) else "",
            default_frames=int(self._unet_config["num_frames"]),
        )
        #: Seconds that opening it took.
        self.load_s = time.perf_counter() - started
        loaded = ", ".join(str(part.name).lower() for part in parts)
        logger.info("Loaded %s (%s) in %.1f s.", name, loaded, self.load_s)

    @property
    def info(self) -> ModelInfo:
        """What this model is."""
        return self._info

    def warm_up(self, parameters: VideoParameters) -> None:
        """Run each part once on a gray photo, so that the first video does not pay for compiling and choosing kernels.

        On a CPU there is nothing to warm up that would be worth a step.
        """
        if self._device.type == "cpu":
            return
        shape = (1, parameters.num_frames, 4, parameters.height // 8, parameters.width // 8)
        tensors: dict[str, Tensor] = {
            "image_embedding": torch.zeros((1, 1, self._unet_config["cross_attention_dim"])),
            "image_latents": torch.zeros(shape[:1] + shape[2:]),
            "latents": torch.zeros(shape),
        }
        tensors = {name: tensor.to(self._device, self._dtype) for name, tensor in tensors.items()}
        if Part.ENCODER in self._parts:
            self.encode(PIL.Image.new("RGB", (parameters.width, parameters.height), "gray"), parameters)
        if Part.DENOISER in self._parts:
            self.denoiser(tensors, parameters).step(tensors["latents"], 0)
        if Part.DECODER in self._parts:
            self.decode(tensors, parameters, parameters.decode_chunk_size or parameters.num_frames)

    @torch.inference_mode()
    def encode(self, photo: PIL.Image.Image | None, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode a photo of exactly width x height and draw the initial noise.

        Returns:
            `image_embedding` (1, 1, E), `image_latents` (1, 4, H/8, W/8) and `latents` (1, F, 4, H/8, W/8), without
            the zeros that guidance adds: the denoiser makes those.
        """
        assert Part.ENCODER in self._parts
        assert photo is not None
        assert photo.size == (parameters.width, parameters.height)
        from diffusers.utils.torch_utils import randn_tensor

        pipeline = self._pipeline
        generator = torch.Generator("cpu").manual_seed(parameters.seed)
        # (3) A PIL image, because CLIP's antialiased resize is skipped for tensors.
        image_embedding = pipeline._encode_image(photo, self._device, 1, do_classifier_free_guidance=False)
        # (4) Noise augmentation comes first from the generator, in the preprocessed image's float32.
        image = pipeline.video_processor.preprocess(photo, height=parameters.height, width=parameters.width)
        image = image.to(self._device)
        noise = randn_tensor(image.shape, generator=generator, device=self._device, dtype=image.dtype)
        image = image + parameters.noise_aug_strength * noise
        needs_upcasting = pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast
        if needs_upcasting:
            pipeline.vae.to(dtype=torch.float32)
        image_latents = pipeline._encode_vae_image(image, self._device, 1, do_classifier_free_guidance=False)
        if needs_upcasting:
            pipeline.vae.to(dtype=torch.float16)
        # (6), (7) Only this method uses the pipeline's own scheduler: the noise is scaled by its largest sigma.
        pipeline.scheduler.set_timesteps(parameters.steps, device=self._device)
        latents = pipeline.prepare_latents(
            1,
            parameters.num_frames,
            self._unet_config["in_channels"],
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
    def denoiser(self, tensors: Tensors, parameters: VideoParameters) -> "SvdDenoiser":
        """Prepare the denoising of one sample, with a scheduler of its own, from any step on."""
        assert Part.DENOISER in self._parts
        # (3), (4) With guidance the batch is [unconditional: zeros, conditional].
        image_embedding = tensors["image_embedding"]  # (1, 1, E)
        image_latents = tensors["image_latents"]  # (1, 4, H/8, W/8)
        if parameters.guided:
            image_embedding = torch.cat([torch.zeros_like(image_embedding), image_embedding])
            image_latents = torch.cat([torch.zeros_like(image_latents), image_latents])
        dtype = image_embedding.dtype
        # (5) Stable Video Diffusion was conditioned on fps - 1.
        added_time_ids = self._pipeline._get_add_time_ids(
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
        scheduler = type(self._pipeline.scheduler).from_config(self._pipeline.scheduler.config)
        scheduler.set_timesteps(parameters.steps, device=self._device)
        return SvdDenoiser(
            unet=self._pipeline.unet,
            scheduler=scheduler,
            image_embedding=image_embedding,
            image_latents=image_latents.unsqueeze(1).repeat(1, parameters.num_frames, 1, 1, 1),
            added_time_ids=added_time_ids.to(self._device),
            guidance_scale=guidance_scale.to(self._device, dtype)[None, :, None, None, None],
            guided=parameters.guided,
        )

    @torch.inference_mode()
    def decode(self, tensors: Tensors, parameters: VideoParameters, decode_chunk_size: int) -> Frames:
        """Decode final latents, `decode_chunk_size` frames at a time.

        Raises:
            SampleError: the frames are not numbers.
        """
        assert Part.DECODER in self._parts
        frames = self._pipeline.decode_latents(tensors["latents"], parameters.num_frames, decode_chunk_size)
        if not torch.isfinite(frames).all():
            raise SampleError(
                "The decoded frames are not numbers (NaN or infinity); "
                "try another seed, or float32 instead of half precision."
            )
        images = self._pipeline.video_processor.postprocess_video(frames, output_type="pil")[0]
        return np.stack([np.asarray(image) for image in images])


@dataclass(kw_only=True)
class SvdDenoiser:
    """The denoising of one sample: (9) of diffusers' `__call__`. B is 2 with guidance and 1 without."""

    #: UNetSpatioTemporalConditionModel, shared by all samples: it keeps no state.
    unet: Any
    #: EulerDiscreteScheduler of this sample alone: it counts steps.
    scheduler: Any
    #: (B, 1, E)
    image_embedding: Tensor
    #: (B, F, 4, H/8, W/8)
    image_latents: Tensor
    #: (B, 3): fps - 1, motion_bucket_id, noise_aug_strength.
    added_time_ids: Tensor
    #: (1, F, 1, 1, 1)
    guidance_scale: Tensor
    #: Whether guidance is on.
    guided: bool

    @torch.inference_mode()
    def step(self, latents: Tensor, index: int) -> Tensor:
        """Do step `index`: latents (1, F, 4, H/8, W/8) in, the same shape and dtype out."""
        scheduler = self.scheduler
        if scheduler.step_index != index:
            # The first step of this range of steps: the scheduler counts on from here.
            scheduler.set_begin_index(index)
            scheduler._step_index = None
        timestep = scheduler.timesteps[index]
        model_input = torch.cat([latents] * 2) if self.guided else latents
        model_input = scheduler.scale_model_input(model_input, timestep)
        # Concatenated over channels: (B, F, 8, H/8, W/8)
        model_input = torch.cat([model_input, self.image_latents], dim=2)
        noise_pred = self.unet(
            model_input,
            timestep,
            encoder_hidden_states=self.image_embedding,
            added_time_ids=self.added_time_ids,
            return_dict=False,
        )[0]
        if self.guided:
            unconditional, conditional = noise_pred.chunk(2)
            noise_pred = unconditional + self.guidance_scale * (conditional - unconditional)
        previous: Tensor = scheduler.step(noise_pred, timestep, latents, return_dict=False)[0]
        return previous
