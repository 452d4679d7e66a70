"""Stable Video Diffusion through diffusers: the arithmetic of StableVideoDiffusionPipeline, split into parts.

It calls the pipeline's own methods wherever possible, so that results equal diffusers' bit by bit; comments refer to
the lines of its `__call__` that the rest repeats. Never uses the network.
"""

import copy
import logging
import time
from collections.abc import Mapping
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.base import ModelInfo, Role, State, check_tensor, nan_advice, random_like
from svdq.pipeline.models.components import first_not_finite
from svdq.pipeline.models.device_memory import MemoryMeter
from svdq.pipeline.models.family import Segment
from svdq.pipeline.models.load_errors import in_a_sentence
from svdq.pipeline.models.memory import shape_for
from svdq.pipeline.models.options import DEFAULTS, ComputeOptions, apply, weight_bytes
from svdq.pipeline.models.pixels import to_uint8
from svdq.pipeline.models.svd.denoiser import SvdDenoiser
from svdq.pipeline.models.svd.family import FAMILY
from svdq.pipeline.models.svd.folder import SvdFolder
from svdq.pipeline.models.svd.layout import UNET_DEFAULTS
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.models.untrained import is_untrained
from svdq.pipeline.parameters import VideoParameters

logger = logging.getLogger(__name__)


class SvdModel:
    """Any StableVideoDiffusionPipeline: a diffusers folder, or a hub id whose files are in the hub's cache."""

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
        folder = SvdFolder.find(name, dtype)
        self._role = role
        self._device = device
        self._dtype = dtype
        self._options = options
        # Quantized weights may fit where full ones do not, so they are moved to the GPU layer by layer.
        on_host = "int8" in options.approximate and device.type != "cpu"
        self._pipeline = folder.load_pipeline(role, dtype, device, unet_on_host=on_host)
        if self._pipeline.unet is not None:
            with in_a_sentence(f"The unet of the model {name}", device):
                apply(self._pipeline.unet, options, device)
                if on_host:
                    self._pipeline.to(device)
        self._meter = MemoryMeter.of(device)
        #: A scheduler for each number of steps, as a template for those of samples.
        self._schedulers: dict[int, Any] = {}
        self._unet_config = UNET_DEFAULTS | folder.config("unet")
        self._facts = FAMILY.read_facts(folder.path, name)
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

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in the number of frames."""
        return FAMILY.fill_in(parameters, self._info.name, self._facts)

    def segments(self, parameters: VideoParameters) -> tuple[Segment, ...]:
        """Return one segment: the UNet does all steps."""
        return FAMILY.segments(parameters, self._facts)

    def check_state(self, state: State, parameters: VideoParameters) -> None:
        """Check the tensors of a state; see `VideoModel`."""
        picture = (parameters.height // 8, parameters.width // 8)
        dtype = self._info.compute["dtype"]
        check_tensor(state, "image_embedding", (1, 1, self._unet_config["cross_attention_dim"]), dtype)
        check_tensor(state, "image_latents", (1, 4, *picture), dtype)
        check_tensor(state, "latents", (1, parameters.num_frames, 4, *picture), dtype)

    @property
    def pipeline(self) -> Any:
        """The diffusers pipeline with the requested components."""
        return self._pipeline

    def _modules(self) -> list[torch.nn.Module]:
        return [item for item in self._pipeline.components.values() if isinstance(item, torch.nn.Module)]

    def memory(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured memory of parts on this rank's GPU for a shape; see `VideoModel`."""
        return self._meter.measured(parameters)

    def broken_weights(self) -> str:
        """Return the name of the first weight that is not finite; see `VideoModel`."""
        return first_not_finite(self._pipeline)

    def warm_up(self, parameters: VideoParameters) -> None:
        """Run each part once on a gray photo, so that the first video does not wait for compiling and kernel selection.

        On a CPU only compiling is worth a step.
        """
        on_cpu = self._device.type == "cpu"
        if on_cpu and self._options.compiled == "off":
            return
        tensors = self._zeros(parameters)
        if self._role.encode and not on_cpu:
            self.encode(PIL.Image.new("RGB", (parameters.width, parameters.height), "gray"), parameters)
        if self._role.has("unet"):
            self.denoiser(tensors, parameters).step(tensors, 0)
        if self._role.decode and not on_cpu:
            self.decode(tensors, parameters, parameters.decode_chunk_size or parameters.num_frames)

    def _zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros."""
        picture = (parameters.height // 8, parameters.width // 8)
        shapes: dict[str, tuple[int, ...]] = {
            "image_embedding": (1, 1, self._unet_config["cross_attention_dim"]),
            "image_latents": (1, 4, *picture),
            "latents": (1, parameters.num_frames, 4, *picture),
        }
        return {name: torch.zeros(shape).to(self._device, self._dtype) for name, shape in shapes.items()}

    def random_state(self, parameters: VideoParameters, index: int) -> dict[str, Tensor]:
        """Draw a state before step `index`, as noisy as it is there; see `FolderModel`."""
        state = random_like(self._zeros(parameters), parameters.seed)
        sigma = float(self._scheduler(parameters.steps).sigmas[index])
        state["latents"] *= (sigma**2 + 1) ** 0.5
        return state

    @torch.inference_mode()
    def encode(self, photo: PIL.Image.Image | None, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode a photo of exactly width x height and draw the initial noise.

        Returns:
            `image_embedding` (1, 1, E), `image_latents` (1, 4, H/8, W/8) and `latents` (1, F, 4, H/8, W/8), without
            the zeros that guidance adds: the denoiser makes those.
        """
        assert self._role.encode
        assert photo is not None
        assert photo.size == (parameters.width, parameters.height)
        with self._meter.measuring("encode", shape_for("encode", parameters)):
            return self._encode(photo, parameters)

    def _encode(self, photo: PIL.Image.Image, parameters: VideoParameters) -> dict[str, Tensor]:
        """Encode the photo; see `encode`."""
        from diffusers.utils.torch_utils import randn_tensor

        assert isinstance(parameters, SvdParameters)
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
    def denoiser(self, state: State, parameters: VideoParameters) -> SvdDenoiser:
        """Prepare the denoising of one sample, with a scheduler of its own, from any step on."""
        assert self._role.has("unet")
        assert isinstance(parameters, SvdParameters)
        measured = self._meter.begin("step", shape_for("step", parameters))
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
        return SvdDenoiser(
            unet=self._pipeline.unet,
            scheduler=self._scheduler(parameters.steps),
            image_embedding=image_embedding,
            image_latents=image_latents.unsqueeze(1).repeat(1, parameters.num_frames, 1, 1, 1),
            added_time_ids=added_time_ids.to(self._device),
            guidance_scale=guidance_scale.to(self._device, dtype)[None, :, None, None, None],
            guided=parameters.guided,
            measured=measured,
        )

    def _scheduler(self, steps: int) -> Any:
        """Create a scheduler with its own counter; those with the same number of steps share their constant tables.

        Setting timesteps reads every sigma back from the device, so it is done once.
        """
        scheduler = self._schedulers.get(steps)
        if scheduler is None:
            scheduler = type(self._pipeline.scheduler).from_config(self._pipeline.scheduler.config)
            scheduler.set_timesteps(steps, device=self._device)
            self._schedulers[steps] = scheduler
        return copy.copy(scheduler)

    @torch.inference_mode()
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode final latents, `decode_chunk_size` frames at a time; return frames (F, H, W, 3), uint8.

        Raises:
            SampleError: the frames are not finite.
        """
        assert self._role.decode
        in_chunks = parameters.model_copy(update={"decode_chunk_size": decode_chunk_size})
        with self._meter.measuring("decode", shape_for("decode", in_chunks)):
            frames = self._pipeline.decode_latents(state["latents"], parameters.num_frames, decode_chunk_size)
            if not torch.isfinite(frames).all():
                advice = nan_advice(self)
                raise SampleError(f"The decoded frames are not numbers (NaN or infinity){advice}")
            return to_uint8(frames[0])
