"""Renders with diffusers' own StableVideoDiffusionPipeline, to compare its bits."""

from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.svd.parameters import SvdParameters


def open_diffusers(model: str, dtype: torch.dtype) -> Any:
    """Open a StableVideoDiffusionPipeline as its users do."""
    from diffusers import StableVideoDiffusionPipeline

    return StableVideoDiffusionPipeline.from_pretrained(model, dtype=dtype)


def call_diffusers(pipeline: Any, image: Image, parameters: SvdParameters, **more: Any) -> Any:
    """Call a StableVideoDiffusionPipeline as its users do; return the frames of each video.

    `more` are other arguments of the pipeline, which override those from the parameters.
    """
    same = ("height", "width", "num_frames", "min_guidance_scale", "max_guidance_scale", "fps", "motion_bucket_id")
    arguments = {name: getattr(parameters, name) for name in (*same, "noise_aug_strength", "decode_chunk_size")}
    arguments |= {
        "num_inference_steps": parameters.steps,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
    }
    return pipeline(image, **(arguments | more)).frames
