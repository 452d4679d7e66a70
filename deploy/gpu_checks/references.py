"""Renders with diffusers' own pipelines as their users call them, to compare bits."""

from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.models.wan.layout import SHIFT_SETTINGS
from svdq.pipeline.models.wan.parameters import WanParameters


def open_diffusers(family: str, model: str, dtype: torch.dtype) -> Any:
    """Open a family's pipeline as its users do; of Wan with VAE and CLIP in float32, as diffusers recommends."""
    from diffusers import AutoencoderKLWan, StableVideoDiffusionPipeline, WanImageToVideoPipeline
    from transformers import CLIPVisionModel

    if family == "svd":
        return StableVideoDiffusionPipeline.from_pretrained(model, dtype=dtype)
    parts = {"vae": AutoencoderKLWan.from_pretrained(model, subfolder="vae", dtype=torch.float32)}
    if Path(model, "image_encoder").is_dir():
        parts["image_encoder"] = CLIPVisionModel.from_pretrained(model, subfolder="image_encoder", dtype=torch.float32)
    return WanImageToVideoPipeline.from_pretrained(model, dtype=dtype, **parts)


def call_diffusers(pipeline: Any, image: Image, parameters: SvdParameters | WanParameters, **more: Any) -> Any:
    """Call a pipeline with the parameters of a video; return the frames of each video.

    `more` are other arguments of the pipeline, which override those from the parameters. The scheduler of a pipeline of
    Wan is replaced by one with the shift of the parameters.
    """
    if isinstance(parameters, SvdParameters):
        names = ["height", "width", "num_frames", "min_guidance_scale", "max_guidance_scale", "fps", "motion_bucket_id"]
        names += ["noise_aug_strength", "decode_chunk_size"]
    else:
        names = ["prompt", "negative_prompt", "height", "width", "num_frames", "guidance_scale", "guidance_scale_2"]
        kind = type(pipeline.scheduler)
        shift = {SHIFT_SETTINGS[kind.__name__]: parameters.flow_shift}
        pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **shift)
    arguments: dict[str, Any] = {name: getattr(parameters, name) for name in names} | {
        "num_inference_steps": parameters.steps,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
        "output_type": "pil",
    }
    return pipeline(image, **(arguments | more)).frames
