"""Renders with diffusers' own pipelines as their users call them, to compare bits."""

from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.ltx.family import LtxParameters, Stage, stages_of
from svdq.pipeline.models.ltx.layout import GIVEN_SIGMAS, UPSAMPLER, read_facts
from svdq.pipeline.models.names.model_names import find_folder
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import SHIFT_SETTINGS
from svdq.pipeline.models.weights.components import name_of
from svdq.pipeline.models.weights.model_folder import WEIGHTS, is_half, loaded_files
from svdq.pipeline.video_parameters import VideoParameters


def open_diffusers(family: str, model: str, dtype: torch.dtype) -> Any:
    """Open a family's pipeline as its users do; of Wan with VAE and CLIP in float32, as diffusers recommends.

    The files of components in `dtype` are of the fp16 variant where svdq loads these.
    """
    from diffusers import AutoencoderKLWan, StableVideoDiffusionPipeline, WanImageToVideoPipeline
    from transformers import CLIPVisionModel

    folder = find_folder(model)
    _, layout = family_of(folder, model)
    files = [loaded_files(folder, name, WEIGHTS[name_of(dtype)]) for name in {*layout.weighted} - layout.float32]
    has_half = any(found and is_half(found[0].name) for found in files)
    arguments = {"dtype": dtype, "variant": "fp16" if has_half else None}
    if family == "svd":
        return StableVideoDiffusionPipeline.from_pretrained(folder, **arguments)
    if family == "ltx":
        return _open_ltx(folder, arguments)
    parts = {"vae": AutoencoderKLWan.from_pretrained(folder / "vae", dtype=torch.float32)}
    if (folder / "image_encoder").is_dir():
        parts["image_encoder"] = CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32)
    return WanImageToVideoPipeline.from_pretrained(folder, **arguments, **parts)


def _open_ltx(folder: Path, arguments: dict[str, Any]) -> Any:
    """Open LTX2ConditionPipeline with the vocoder in float32, and the latent upsampler as an attribute."""
    from diffusers import LTX2ConditionPipeline
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2VocoderWithBWE

    vocoder = LTX2VocoderWithBWE.from_pretrained(folder / "vocoder", dtype=torch.float32)
    # The pipeline does not convert the spectrogram, which has the dtype of the audio VAE.
    vocoder.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.float32),))
    pipeline = LTX2ConditionPipeline.from_pretrained(folder, vocoder=vocoder, **arguments)
    if (folder / UPSAMPLER).is_dir():
        pipeline.latent_upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder / UPSAMPLER, **arguments)
    return pipeline


def call_diffusers(pipeline: Any, image: Image, parameters: VideoParameters, **more: Any) -> Any:
    """Call a pipeline with the parameters of a video; return the frames of each video.

    `more` are other arguments of the pipeline, such as `last_image`, which override those from the parameters. The
    scheduler of a pipeline of Wan is replaced by one with the shift of the parameters.
    """
    if isinstance(parameters, LtxParameters):
        return call_ltx(pipeline, image, parameters, **more)[0]
    if isinstance(parameters, SvdParameters):
        names = ["height", "width", "num_frames", "min_guidance_scale", "max_guidance_scale", "fps", "motion_bucket_id"]
        names += ["noise_aug_strength", "decode_chunk_size"]
    else:
        assert isinstance(parameters, WanParameters)
        names = ["prompt", "negative_prompt", "height", "width", "num_frames", "guidance_scale", "guidance_scale_2"]
        more = {"last_image": image if parameters.loop else None} | more
        kind = type(pipeline.scheduler)
        shift = {SHIFT_SETTINGS[kind.__name__]: parameters.flow_shift}
        pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **shift)
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in names} | {
        "num_inference_steps": parameters.steps,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
        "output_type": "pil",
    }
    return pipeline(image, **(arguments | more)).frames


def call_ltx(
    pipeline: Any,
    image: Image,
    parameters: LtxParameters,
    last_image: Image | None = None,
    facts: Facts | None = None,
    **more: Any,
) -> tuple[Any, torch.Tensor]:
    """Call LTX-2 as its documentation does, twice for two stages; return the frames of each video, and its sound.

    One generator draws for both calls, which have the same conditions and text. The sound is (1, 2, N). `facts` are
    those of a model file.
    """
    from diffusers import LTX2LatentUpsamplePipeline
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

    facts = facts or read_facts(Path(pipeline.config._name_or_path), "")
    generator = torch.Generator("cpu").manual_seed(parameters.seed)
    last_image = image if parameters.loop else last_image
    conditions = [LTX2VideoCondition(image, 0, 1.0)]
    conditions += [] if last_image is None else [LTX2VideoCondition(last_image, -1, 1.0)]
    names = ["prompt", "negative_prompt", "num_frames", "guidance_scale", "audio_guidance_scale", "stg_scale"]
    names += ["modality_scale", "guidance_rescale"]
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in names} | {
        "frame_rate": float(parameters.fps),
        "audio_stg_scale": None,
        "audio_modality_scale": None,
        "audio_guidance_rescale": None,
        "spatio_temporal_guidance_blocks": [min(28, pipeline.transformer.config.num_layers - 1)],
        "generator": generator,
        "return_dict": False,
    }
    scheduler, first = pipeline.scheduler, stages_of(parameters, facts)[0]
    height, width = first.height * 32, first.width * 32
    sigmas = {} if first.sigmas is None else {"sigmas": [*first.sigmas]}
    is_last = parameters.stages == 1
    if facts.get("is_ancestral"):
        pipeline.scheduler = _ancestral(generator, first)
    try:
        found = pipeline(
            conditions=conditions,
            height=height,
            width=width,
            num_inference_steps=first.num_steps,
            **sigmas,
            **arguments,
            output_type="pil" if is_last else "latent",
            **more,
        )
    finally:
        pipeline.scheduler = scheduler
    if is_last:
        return found
    latents, audio_latents = found
    upsample = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=pipeline.latent_upsampler)
    upsample.set_progress_bar_config(disable=True)
    size = {"height": height, "width": width, "num_frames": parameters.num_frames}
    latents = upsample(latents=latents, output_type="latent", return_dict=False, **size)[0]
    second = stages_of(parameters, facts)[1]
    assert second.sigmas is not None
    if facts.get("is_ancestral"):
        pipeline.scheduler = _ancestral(generator, second)
    else:
        pipeline.scheduler = type(scheduler).from_config(scheduler.config, **GIVEN_SIGMAS)
    try:
        return pipeline(
            conditions=conditions,
            latents=latents,
            audio_latents=audio_latents,
            height=parameters.height,
            width=parameters.width,
            sigmas=[*second.sigmas],
            noise_scale=second.sigmas[0],
            **arguments,
            output_type="pil",
            **more,
        )
    finally:
        pipeline.scheduler = scheduler


def _ancestral(generator: torch.Generator, stage: Stage) -> Any:
    """Return diffusers' ancestral scheduler for a pipeline that gives it neither a last level nor a generator.

    Photos have no noise: after each step but the last their tokens are as before the first, as in diffusers'
    LTX2DFRTemporalRefinePipeline.
    """
    from diffusers import LTXEulerAncestralRFScheduler

    class Scheduler(LTXEulerAncestralRFScheduler):
        clean: torch.Tensor

        def __deepcopy__(self, memo: Any) -> Any:  # for the sound, with the same generator
            return Scheduler()

        def set_timesteps(self, *_: Any, sigmas: list[float], device: Any = None, **__: Any) -> None:
            super().set_timesteps(sigmas=[*sigmas, 0.0], device=device)
            self.timesteps = self.timesteps[:-1]

        def step(self, velocity: Any, t: Any, sample: torch.Tensor, return_dict: bool = False) -> Any:
            if self.step_index is None:
                self.clean = sample
            moved = super().step(velocity, t, sample, generator=generator, return_dict=False)[0]
            if self is pipeline_scheduler and self.step_index < stage.num_steps:
                for photo in (slice(stage.frame_tokens), slice(stage.tokens, None)):
                    moved[:, photo] = self.clean[:, photo]
            return (moved,)

    pipeline_scheduler = Scheduler()
    return pipeline_scheduler
