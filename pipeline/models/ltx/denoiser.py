"""The denoising loop of LTX2ConditionPipeline for one sample, one step per call, in one stage or in two.

The second stage begins with the first stage's latents, upsampled, and with noise that was drawn with all other noise;
both happen in its first step. Comments refer to the lines of diffusers' `__call__`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.ltx.family import (
    STG_BLOCK,
    LtxParameters,
    Stage,
    audio_frames,
)
from svdq.pipeline.models.ltx.schedule import Schedule
from svdq.pipeline.models.video_model import State


class _Prepared(NamedTuple):
    """What is constant over the steps of a stage; B is 2 with guidance and 1 without."""

    schedule: Schedule
    video_coords: Tensor  # (B, 3, N, 2)
    audio_coords: Tensor  # (B, 1, L, 2)
    mask: Tensor  # (B, N, 1): 1 for tokens of photos
    clean: Tensor  # (1, N, C): photos, and zeros


@dataclass(kw_only=True)
class LtxDenoiser:
    """The denoising of one sample: (5) to (7) of diffusers' `__call__`, and the latent upsampler between two calls."""

    pipeline: Any  # the LTX2ConditionPipeline with the components of this rank
    transformer_of: Callable[[], Any]  # returns the LTX2VideoTransformer3DModel with the LoRAs of this sample
    #: Mean and standard deviation of the latents of each VAE, which this rank need not have.
    statistics: Mapping[str, tuple[Tensor, Tensor]]
    schedule: Callable[[Stage, int], Schedule]
    stages: tuple[Stage, ...]
    parameters: LtxParameters
    facts: Facts
    dtype: torch.dtype  # of the transformer's inputs
    measured: Callable[[], None] = lambda: None  # called at the end of a step, which ends the measurement of its memory
    _prepared: dict[int, _Prepared] = field(default_factory=dict)  # by the number of the stage

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, N, C) and `audio_latents` (1, L, C')."""
        stage = next(each for each in reversed(self.stages) if each.first_step <= index)
        emptied: dict[str, Tensor] = {}
        if stage.number and index == stage.first_step:
            state = {**state, **self._second_stage(state, *self.stages)}
            # Nothing needs them any more; what has no numbers takes no time to send.
            names = ("noise", "audio_noise", "photo_latents_0", *noise_names(0))
            emptied = {name: state[name][:, :0] for name in names if name in state}
        if stage.number not in self._prepared:
            self._prepared[stage.number] = self._prepare(state, stage)
        changed = self._step(state, index - stage.first_step, stage, self._prepared[stage.number])
        self.measured()
        return changed | emptied

    def _second_stage(self, state: State, first: Stage, second: Stage) -> dict[str, Tensor]:
        """Upsample what the first stage made, and add noise: the end of a call, LTX2LatentUpsamplePipeline, and (4)."""
        pipeline, scale = self.pipeline, self.facts["vae"].get("scaling_factor", 1.0)
        statistics, audio_statistics = self.statistics["vae"], self.statistics["audio_vae"]
        latents = pipeline._unpack_latents(state["latents"][:, : first.tokens], first.frames, first.height, first.width)
        latents = pipeline._denormalize_latents(latents, *statistics, scale)
        latents = pipeline.latent_upsampler(latents.to(self.dtype))
        latents = pipeline._pack_latents(pipeline._normalize_latents(latents, *statistics, scale))
        latents, mask, _ = with_photos(pipeline, latents, state["photo_latents_1"], second)
        assert second.sigmas is not None
        noise_scale = second.sigmas[0]
        audio_latents = pipeline._denormalize_audio_latents(state["audio_latents"], *audio_statistics)
        audio_latents = pipeline._normalize_audio_latents(audio_latents, *audio_statistics)
        return {
            "latents": with_noise(latents, mask, state["noise"], noise_scale),
            "audio_latents": noise_scale * state["audio_noise"] + (1 - noise_scale) * audio_latents,
        }

    def _prepare(self, state: State, stage: Stage) -> _Prepared:
        pipeline, parameters, transformer = self.pipeline, self.parameters, self.transformer_of()
        photos, device = state[f"photo_latents_{stage.number}"], state["latents"].device
        blank = torch.zeros(
            (1, stage.tokens, photos.shape[2]), dtype=base_dtype(stage, photos, self.dtype), device=device
        )
        blank, mask, clean = with_photos(pipeline, blank, photos, stage)
        fps = self._fps
        coords = transformer.rope.prepare_video_coords(1, stage.frames, stage.height, stage.width, device, fps=fps)
        audio_coords = transformer.audio_rope.prepare_audio_coords(1, audio_frames(parameters, self.facts), device)
        if parameters.has_last_photo:
            first_frame = (stage.frames - 2) * pipeline.vae_temporal_compression_ratio + 1
            last = pipeline._prepare_keyframe_coords(1, stage.height, stage.width, first_frame, 1, fps, device)
            coords = torch.cat([coords, last], dim=2)
        batch = 1 + parameters.guided
        return _Prepared(
            self.schedule(stage, blank.shape[1]),
            coords.repeat(batch, 1, 1, 1),
            audio_coords.repeat(batch, 1, 1, 1),
            mask.repeat(batch, 1, 1),
            clean,
        )

    def _step(self, state: State, index: int, stage: Stage, prepared: _Prepared) -> dict[str, Tensor]:
        """Do step `index` of a stage: an iteration of (7)."""
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import rescale_noise_cfg

        pipeline, parameters, transformer = self.pipeline, self.parameters, self.transformer_of()
        samples = (state["latents"], state["audio_latents"])
        texts: tuple[Tensor, ...] = (state["video_text"], state["audio_text"], state["text_mask"])
        t, scheduler = prepared.schedule.timesteps[index], prepared.schedule.at(index)

        def predict(batch: int, text: tuple[Tensor, ...], **how: Any) -> list[Tensor]:
            """Return what the transformer predicts of video and sound, as velocities in float32."""
            latents, audio_latents = (torch.cat([each] * batch) if batch > 1 else each for each in samples)
            timestep = t.expand(batch)
            found = transformer(
                hidden_states=latents.to(self.dtype),
                audio_hidden_states=audio_latents.to(self.dtype),
                encoder_hidden_states=text[0],
                audio_encoder_hidden_states=text[1],
                timestep=timestep.unsqueeze(-1) * (1 - prepared.mask[:batch].squeeze(-1)),
                audio_timestep=timestep,
                sigma=timestep,
                audio_sigma=timestep,
                encoder_attention_mask=text[2],
                audio_encoder_attention_mask=text[2],
                num_frames=stage.frames,
                height=stage.height,
                width=stage.width,
                fps=self._fps,
                audio_num_frames=audio_latents.shape[1],
                video_coords=prepared.video_coords[:batch],
                audio_coords=prepared.audio_coords[:batch],
                use_cross_timestep=True,
                return_dict=False,
                **how,
            )
            return [each.float() for each in found]

        def clean(velocities: list[Tensor]) -> list[Tensor]:
            pairs = zip(samples, velocities, strict=True)
            return [pipeline.convert_velocity_to_x0(sample, each, index, scheduler) for sample, each in pairs]

        scales, stg_scale, modality_scale, rescale = _scales(parameters)
        if parameters.guided:
            unconditional, conditional = zip(*(each.chunk(2) for each in predict(2, texts)), strict=True)
            found, others = clean(list(conditional)), clean(list(unconditional))
            deltas = [[(scale - 1) * (a - b)] for scale, a, b in zip(scales, found, others, strict=True)]
            texts = tuple(each.chunk(2)[1] for each in texts)
        else:
            found = clean(predict(1, texts))
            deltas = [[], []]
        if stg_scale > 0:
            others = clean(predict(1, texts, spatio_temporal_guidance_blocks=[self._stg_block]))
            for delta, a, b in zip(deltas, found, others, strict=True):
                delta.append(stg_scale * (a - b))
        if modality_scale > 1:
            others = clean(predict(1, texts, isolate_modalities=True))
            for delta, a, b in zip(deltas, found, others, strict=True):
                delta.append((modality_scale - 1) * (a - b))
        guided = [sum(delta, start=each) for delta, each in zip(deltas, found, strict=True)]
        if rescale > 0:
            pairs = zip(guided, found, strict=True)
            guided = [rescale_noise_cfg(each, plain, guidance_rescale=rescale) for each, plain in pairs]
        mask = prepared.mask[:1]

        def with_clean(video: Tensor) -> Tensor:
            return (video * (1 - mask) + prepared.clean * mask).to(video.dtype)

        guided[0] = with_clean(guided[0])
        moved = []
        is_noisy = self.facts.get("is_ancestral", False) and index + 1 < stage.num_steps
        for sample, each, name in zip(samples, guided, noise_names(stage.number), strict=True):
            own = prepared.schedule.at(index)  # a scheduler counts steps
            velocity = pipeline.convert_x0_to_velocity(sample, each, index, own)
            if is_noisy:
                moved.append(prepared.schedule.ancestral_step(velocity, index, sample, state[name][index : index + 1]))
            else:
                moved.append(own.step(velocity, t, sample, return_dict=False)[0])
        if is_noisy:
            moved[0] = with_clean(moved[0])  # photos stay without noise
        return {"latents": moved[0], "audio_latents": moved[1]}

    @property
    def _fps(self) -> float:
        assert self.parameters.fps is not None
        return float(self.parameters.fps)

    @property
    def _stg_block(self) -> int:
        return min(STG_BLOCK, int(self.facts["transformer"]["num_layers"]) - 1)


def noise_names(stage: int) -> tuple[str, str]:
    """Return the names in a state of the noise of a stage's ancestral steps: (S - 1, N, C), and of sound."""
    return f"step_noise_{stage}", f"audio_step_noise_{stage}"


def _scales(parameters: LtxParameters) -> tuple[tuple[float, float], float, float, float]:
    """Return the scales of guidance, of video and sound, and the scales that are the same for both."""
    scale, stg, modality = parameters.guidance_scale, parameters.stg_scale, parameters.modality_scale
    rescale = parameters.guidance_rescale
    assert scale is not None
    assert stg is not None
    assert modality is not None
    assert rescale is not None
    # As in diffusers: 0 is as the video's.
    return (scale, parameters.audio_guidance_scale or scale), stg, modality, rescale


def with_photos(pipeline: Any, latents: Tensor, photos: Tensor, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    """Put photos into latents (1, N, C): the first in place of the first frame, a last one behind; as in diffusers.

    Returns the latents, what marks the tokens of photos (1, N, 1), and these alone (1, N, C). See `prepare_latents`.
    """
    first, last = photos.tensor_split([stage.frame_tokens], dim=1)
    mask = latents.new_zeros((1, stage.tokens, 1))
    latents, mask, clean = pipeline.apply_first_frame_conditioning(
        latents, mask, [first], [1.0], [0], stage.height, stage.width
    )
    if last.shape[1]:  # float32 from here on, whatever the upsampler's dtype
        latents, clean = torch.cat([latents, last], dim=1), torch.cat([clean, last], dim=1)
        mask = torch.cat([mask, mask.new_ones((1, last.shape[1], 1))], dim=1)
    return latents, mask, clean


def with_noise(latents: Tensor, mask: Tensor, noise: Tensor, scale: float) -> Tensor:
    """Add noise to all tokens of latents (1, N, C) that are not of photos; see `prepare_latents`."""
    scaled_mask = (1.0 - mask) * scale
    return noise * scaled_mask + latents * (1 - scaled_mask)


def base_dtype(stage: Stage, photos: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the latents that a stage begins with: the upsampler's, unless a last photo is behind them."""
    return dtype if stage.number and photos.shape[1] == stage.frame_tokens else torch.float32
