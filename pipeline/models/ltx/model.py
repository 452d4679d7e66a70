"""LTX-2 through diffusers: the arithmetic of LTX2ConditionPipeline, split into encode, steps and decode.

It calls the pipeline's own methods wherever possible, so that results equal diffusers' bit by bit; comments refer to
the lines of its `__call__` that the rest repeats. Never uses the network.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import InputError, SampleError, how_to_install
from svdq.pipeline.models.ltx.denoiser import LtxDenoiser, base_dtype, noise_names, with_noise, with_photos
from svdq.pipeline.models.ltx.family import FAMILY, LtxParameters, Stage, audio_frames, stages_of
from svdq.pipeline.models.ltx.layout import TRANSFORMER
from svdq.pipeline.models.ltx.schedule import Schedule
from svdq.pipeline.models.prompted_model import PromptedModel, Texts
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role, State, all_finite, nan_advice
from svdq.pipeline.models.weights.comfy_quant import DATA
from svdq.pipeline.video_parameters import VideoParameters

CACHED_SCHEDULES = 64
MAX_TOKENS = 1024  # of a prompt; shorter ones are padded


class LtxModel(PromptedModel):
    """Any model of LTX-2.3 or 2.5."""

    family = FAMILY
    #: (B, 1024, E), (B, 1024, E') and (B, 1024); B is 2 with guidance, the negative prompt first.
    embedded = ("video_text", "audio_text", "text_mask")
    decoded = ("latents", "audio_latents")

    def __init__(self, model: ResolvedModel, role: Role, *args: Any, **kwargs: Any) -> None:
        if role.encode and importlib.util.find_spec("av") is None:  # diffusers compresses photos with it
            raise InputError(f"Models of LTX-2 need av, which is not installed; {how_to_install('ltx')}.")
        super().__init__(model, role, *args, **kwargs)
        self._schedule = lru_cache(CACHED_SCHEDULES)(partial(Schedule, facts=self._facts, device=self._device))
        #: Mean and standard deviation of latents, which ranks need that have no VAE.
        self._statistics = {name: self._read_statistics(name) for name in ("vae", "audio_vae")}

    def _read_statistics(self, component: str) -> tuple[Tensor, Tensor]:
        _, stored, _ = self._found.open_changed(self._found.class_of(component), component)
        dtype = self._found.dtype_of(component)
        mean, std = (stored[name].read()[DATA].to(self._device, dtype) for name in ("latents_mean", "latents_std"))
        return mean, std

    def zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros; see `_encode`."""
        assert isinstance(parameters, LtxParameters)
        transformer, batch = self._facts["transformer"], 1 + parameters.guided
        text = torch.zeros((batch, MAX_TOKENS, transformer["cross_attention_dim"]), dtype=self._dtype)
        audio_text = torch.zeros((batch, MAX_TOKENS, transformer["audio_cross_attention_dim"]), dtype=self._dtype)
        mask = torch.ones((batch, MAX_TOKENS), dtype=torch.int64)
        photos = []
        for stage in stages_of(parameters, self._facts):
            num_photos = 1 + parameters.has_last_photo
            photos.append(torch.zeros((1, num_photos * stage.frame_tokens, transformer["in_channels"])))
        state = {"video_text": text, "audio_text": audio_text, "text_mask": mask}
        state |= {f"photo_latents_{number}": each for number, each in enumerate(photos)}
        return {name: each.to(self._device) for name, each in state.items()} | self._noise(parameters, photos)

    def _after_steps(self, zeros: State, parameters: VideoParameters) -> State:
        assert isinstance(parameters, LtxParameters)
        latents, stage = zeros["latents"], stages_of(parameters, self._facts)[-1]
        return {**zeros, "latents": latents.new_zeros((1, stage.tokens, latents.shape[-1]))}

    def _texts_of(self, parameters: VideoParameters) -> list[Texts]:
        assert isinstance(parameters, LtxParameters)
        return [(parameters.negative_prompt or "", parameters.prompt) if parameters.guided else (parameters.prompt,)]

    def _embed_texts(self, texts: Texts) -> tuple[Tensor, ...]:
        pipeline = self.pipeline
        # (3) The text encoder's own output would take 385 MB.
        found = [
            pipeline._get_gemma_prompt_embeds(text, max_sequence_length=MAX_TOKENS, device=self._device)
            for text in texts
        ]
        embeds, mask = (torch.cat(each) for each in zip(*found, strict=True))
        video_text, audio_text, text_mask = pipeline.connectors(
            embeds, mask, padding_side=pipeline.tokenizer_padding_side
        )
        return video_text, audio_text, text_mask

    def _encode(
        self, photo: PIL.Image.Image, parameters: VideoParameters, last_photo: PIL.Image.Image | None
    ) -> dict[str, Tensor]:
        assert isinstance(parameters, LtxParameters)
        # In rounds they are encoded before, with other components.
        state = (self.embed(parameters) or {}) if self._role.embed and not self.sets else {}
        last_photo = photo if parameters.loop else last_photo
        photos = [photo] if last_photo is None else [photo, last_photo]
        latents = []
        for stage in stages_of(parameters, self._facts):
            latents.append(torch.cat([self._photo_latents(each, stage, parameters) for each in photos], dim=1))
        state |= {f"photo_latents_{number}": each for number, each in enumerate(latents)}
        return state | self._noise(parameters, latents)

    def _photo_latents(self, photo: PIL.Image.Image, stage: Stage, parameters: LtxParameters) -> Tensor:
        """Encode a photo in the size of a stage: normalized latents (1, h w, C), float32; see `prepare_latents`."""
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition, retrieve_latents

        pipeline, ratio = self.pipeline, self.pipeline.vae_spatial_compression_ratio
        condition = LTX2VideoCondition(frames=photo, crf=self._facts["image_crf"])
        pixels = pipeline.preprocess_conditions(
            [condition], stage.height * ratio, stage.width * ratio, parameters.num_frames, self._device
        )[0][0]
        found = retrieve_latents(pipeline.vae.encode(pixels), None, "argmax")
        latents: Tensor = pipeline._normalize_latents(found, *self._statistics["vae"]).to(torch.float32)
        packed: Tensor = pipeline._pack_latents(latents)
        return packed.contiguous()

    def _noise(self, parameters: LtxParameters, photos: list[Tensor]) -> dict[str, Tensor]:
        """Draw all random numbers of a video: of video and sound, for each stage and its steps; see (4).

        Returns the `latents` (1, N, C) and `audio_latents` (1, L, C') that the first stage begins with, the `noise`
        and `audio_noise` for a second one, and what ancestral steps add.
        """
        generator = torch.Generator("cpu").manual_seed(parameters.seed)
        audio, channels = self._facts["audio_vae"], self._facts["transformer"]["in_channels"]
        audio_shape = (1, audio_frames(parameters, self._facts), audio["latent_channels"] * (audio["mel_bins"] // 4))
        state: dict[str, Tensor] = {}
        for stage, photo in zip(stages_of(parameters, self._facts), photos, strict=True):
            tokens = stage.tokens + photo.shape[1] - stage.frame_tokens
            dtype = base_dtype(stage, photo, self._dtype)
            noise = torch.randn((1, tokens, channels), generator=generator, dtype=dtype).to(self._device)
            audio_noise = torch.randn(audio_shape, generator=generator).to(self._device)
            if self._facts.get("is_ancestral"):
                step_noise = [
                    torch.empty((stage.num_steps - 1, *shape)) for shape in ((tokens, channels), audio_shape[1:])
                ]
                for step in range(stage.num_steps - 1):
                    for each in step_noise:  # of the video, then of the sound
                        each[step] = torch.randn(each.shape[1:], generator=generator)
                names = noise_names(stage.number)
                state |= {name: each.to(self._device) for name, each in zip(names, step_noise, strict=True)}
            if stage.number:
                return state | {"noise": noise, "audio_noise": audio_noise}
            blank = torch.zeros((1, stage.tokens, channels), device=self._device)
            latents, mask, _ = with_photos(self.pipeline, blank, photo.to(self._device), stage)
            scale = 1.0 if stage.sigmas is None else stage.sigmas[0]
            state |= {"latents": with_noise(latents, mask, noise, scale), "audio_latents": audio_noise}
        return state

    @torch.inference_mode()
    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> LtxDenoiser:
        assert isinstance(parameters, LtxParameters)
        return LtxDenoiser(
            pipeline=self.pipeline,
            transformer_of=partial(self._denoiser_for, parameters, TRANSFORMER),
            statistics=self._statistics,
            schedule=self._schedule,
            stages=stages_of(parameters, self._facts),
            parameters=parameters,
            facts=self._facts,
            dtype=self._dtype,
            measured=self._measure_step(parameters),
        )

    @torch.inference_mode()
    def sound(self, state: State, parameters: VideoParameters) -> Tensor | None:
        assert isinstance(parameters, LtxParameters)
        if not parameters.sound:
            return None
        pipeline, vae, config = self.pipeline, self.pipeline.audio_vae, self._facts["audio_vae"]
        latents = pipeline._denormalize_audio_latents(state["audio_latents"], vae.latents_mean, vae.latents_std)
        latents = pipeline._unpack_audio_latents(latents, latents.shape[1], num_mel_bins=config["mel_bins"] // 4)
        spectrogram = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        waveform: Tensor = pipeline.vocoder(spectrogram.float())[0]
        if not all_finite([waveform]):
            raise SampleError(f"The decoded sound is not numbers (NaN or infinity){nan_advice(self)}")
        return waveform

    def _decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode; a `decode_chunk_size` below the number of frames decodes in tiles, which changes pixels."""
        assert isinstance(parameters, LtxParameters)
        pipeline, vae = self.pipeline, self.pipeline.vae
        stage = stages_of(parameters, self._facts)[-1]
        latents = pipeline._unpack_latents(state["latents"][:, : stage.tokens], stage.frames, stage.height, stage.width)
        scale = vae.config.scaling_factor
        latents = pipeline._denormalize_latents(latents.to(self._dtype), vae.latents_mean, vae.latents_std, scale)
        vae.use_tiling = decode_chunk_size < parameters.num_frames  # it would apply to encodes, too
        try:
            video: Tensor = vae.decode(latents.to(vae.dtype), None, return_dict=False)[0][0]
        finally:
            vae.use_tiling = False
        if video.dtype == torch.float32:
            return video
        # diffusers scales to 0 to 1 in the VAE's type; the way back is exact in float32.
        return (video * 0.5 + 0.5).float().sub_(0.5).mul_(2)
