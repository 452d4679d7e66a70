"""Wan through diffusers: the arithmetic of WanImageToVideoPipeline, split into encode, steps and decode.

It calls the pipeline's own methods wherever possible, so that results equal diffusers' bit by bit; comments refer to
the lines of its `__call__` that the rest repeats. Never uses the network.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import InputError, SampleError, how_to_install
from svdq.pipeline.models.latent_rgb import rgb_of_latents, some_frames
from svdq.pipeline.models.prompted_model import PromptedModel, Texts
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Denoiser, Role, State
from svdq.pipeline.models.wan.denoiser import (
    Schedule,
    WanDenoiser,
    first_frame_mask,
    history_names,
)
from svdq.pipeline.models.wan.family import FAMILY, FLF2V_14B, WanParameters, needs_last_photo
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.video_parameters import VideoParameters

CACHED_SCHEDULES = 256  # number of schedules that are kept
MAX_TOKENS = 512  # of a prompt; longer ones are cut off, shorter ones padded, which does not travel
IMAGE_TOKENS = 257  # tokens of a photo, for the warm-up: CLIP's patches of ViT-H/14 and one for the whole


class WanModel(PromptedModel):
    """Any image-to-video model of Wan."""

    family = FAMILY
    embedded = ("prompt_embeds", "negative_prompt_embeds")  # (1, N, E), without the padding, which the denoiser adds

    def __init__(self, model: ResolvedModel, role: Role, *args: Any, **kwargs: Any) -> None:
        if role.embed and importlib.util.find_spec("ftfy") is None:  # diffusers raises a NameError for each prompt
            raise InputError(f"Models of Wan need ftfy, which is not installed; {how_to_install('worker')}.")
        super().__init__(model, role, *args, **kwargs)
        if self._facts["expand_timesteps"]:
            self.decoded = ("latents", "condition")
        # Setting timesteps waits for the device, and a long prompt takes seconds.
        self._schedule = lru_cache(CACHED_SCHEDULES)(partial(Schedule, facts=self._facts, device=self._device))

    def zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros, with all that the scheduler may keep; see `_encode` for the others."""
        config, vae = self._facts["transformer"], self._facts["vae"]
        factor, channels = vae["scale_factor_spatial"], vae["z_dim"]
        frames = (parameters.num_frames - 1) // vae["scale_factor_temporal"] + 1
        picture = (parameters.height // factor, parameters.width // factor)
        photo = (channels, 1) if self._facts["expand_timesteps"] else (config["in_channels"] - channels, frames)
        latents = torch.zeros((1, channels, frames, *picture), device=self._device)
        text = torch.zeros((1, 1, config["text_dim"]), device=self._device, dtype=self._dtype)
        state = {name: latents.clone() for name in ("latents", *history_names(self._facts))}
        state |= {"condition": torch.zeros((1, *photo, *picture), device=self._device), "prompt_embeds": text}
        if parameters.guided:
            state["negative_prompt_embeds"] = text.clone()
        if self._facts["has_image_encoder"]:
            num_photos = 2 if needs_last_photo(self._facts) else 1
            state["image_embeds"] = text.new_zeros((num_photos, IMAGE_TOKENS, config["image_dim"]))
        return state

    def _encode(
        self, photo: PIL.Image.Image, parameters: VideoParameters, last_photo: PIL.Image.Image | None
    ) -> dict[str, Tensor]:
        assert isinstance(parameters, WanParameters)
        pipeline = self.pipeline
        last_photo = photo if parameters.loop else last_photo
        if last_photo is None and needs_last_photo(self._facts):
            raise SampleError(f"{FLF2V_14B.title} makes videos between two photos; give a last photo, or loop.")
        photos = [photo] if last_photo is None else [photo, last_photo]
        # In rounds they are encoded before, with other components.
        state = (self.embed(parameters) or {}) if self._role.embed and not self.sets else {}
        if self._facts["has_image_encoder"]:
            # (2, 257, C) with a last photo; the transformer joins both.
            state["image_embeds"] = pipeline.encode_image(photos, self._device).to(self._dtype)
        # (5) The noise is the only random thing.
        size = {"height": parameters.height, "width": parameters.width}
        image, *last_image = (
            pipeline.video_processor.preprocess(each, **size).to(self._device, dtype=torch.float32) for each in photos
        )
        with _one_call(pipeline.vae, tiled=False):
            latents, condition = pipeline.prepare_latents(
                image,
                batch_size=1,
                num_channels_latents=pipeline.vae.config.z_dim,
                **size,
                num_frames=parameters.num_frames,
                dtype=torch.float32,
                device=self._device,
                generator=torch.Generator("cpu").manual_seed(parameters.seed),
                last_image=last_image[0] if last_image else None,
            )[:2]
        return {**state, "latents": latents, "condition": condition}

    def _texts_of(self, parameters: VideoParameters) -> list[Texts]:
        assert isinstance(parameters, WanParameters)
        return [(parameters.prompt,), *([(parameters.negative_prompt or "",)] if parameters.guided else [])]

    def _embed_texts(self, texts: Texts) -> tuple[Tensor, ...]:
        """Return the embedding of a text (1, N, E) without padding, which is zeros."""
        # (3)
        padded = self.pipeline._get_t5_prompt_embeds(*texts, max_sequence_length=MAX_TOKENS, device=self._device)
        is_text = padded[0].ne(0).any(dim=1).nonzero()
        return (padded[:, : int(is_text.max()) + 1].to(self._dtype).clone(),)

    @torch.inference_mode()
    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> WanDenoiser:
        assert isinstance(parameters, WanParameters)
        measured = self._measure_step(parameters)
        scale, scale_2 = parameters.guidance_scale, parameters.guidance_scale_2
        assert scale is not None
        assert parameters.steps is not None
        assert parameters.flow_shift is not None
        image_embeds = state.get("image_embeds")
        return WanDenoiser(
            transformer_of=partial(self._denoiser_for, parameters),
            schedule=self._schedule(parameters.steps, parameters.flow_shift),
            is_skipped=[not cost for cost in step_costs or [1.0] * parameters.steps],
            prompt_embeds=_padded(state["prompt_embeds"]),
            negative_prompt_embeds=_padded(state["negative_prompt_embeds"]) if parameters.guided else None,
            # Created here like all other inputs: the compiler treats received tensors as another kind.
            image_embeds=None if image_embeds is None else image_embeds.clone(),
            condition=state["condition"],
            first_frame_mask=first_frame_mask(state["latents"]) if self._facts["expand_timesteps"] else None,
            guidance_scales={HIGH_NOISE: scale, LOW_NOISE: scale if scale_2 is None else scale_2},
            dtype=self._dtype,
            measured=measured,
        )

    @torch.inference_mode()
    def picture(self, denoiser: Denoiser) -> Tensor | None:
        assert isinstance(denoiser, WanDenoiser)
        expected = denoiser.expected(some_frames)
        return None if expected is None else rgb_of_latents(expected)

    def _decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode; a `decode_chunk_size` below the number of frames decodes in tiles, which changes pixels."""
        vae = self.pipeline.vae
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
        with _one_call(vae, tiled=decode_chunk_size < parameters.num_frames):
            video: Tensor = vae.decode(latents, return_dict=False)[0][0]
        return video


@contextlib.contextmanager
def _one_call(vae: Any, *, tiled: bool) -> Iterator[None]:
    """Encode or decode in tiles or whole, and leave no trace of it in the VAE, whose tiling applies to both."""
    vae.use_tiling = tiled
    try:
        yield
    finally:
        vae.use_tiling = False
        # After an error it would keep features of the last frames: 3 GB at 832x480.
        vae.clear_cache()


def _padded(embedding: Tensor) -> Tensor:
    """Append zeros to (1, N, E) up to 512 tokens, as diffusers does."""
    return torch.nn.functional.pad(embedding, (0, 0, 0, MAX_TOKENS - embedding.shape[1]))
