"""Renders with diffusers' own WanImageToVideoPipeline, to compare its bits."""

from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.wan.layout import SHIFT_SETTINGS
from svdq.pipeline.models.wan.parameters import WanParameters


def open_diffusers(model: str, dtype: torch.dtype) -> Any:
    """Open a WanImageToVideoPipeline as diffusers' documentation recommends, with VAE and CLIP in float32."""
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
    from transformers import CLIPVisionModel

    parts = {"vae": AutoencoderKLWan.from_pretrained(model, subfolder="vae", dtype=torch.float32)}
    if Path(model, "image_encoder").is_dir():
        parts["image_encoder"] = CLIPVisionModel.from_pretrained(model, subfolder="image_encoder", dtype=torch.float32)
    return WanImageToVideoPipeline.from_pretrained(model, dtype=dtype, **parts)


def call_diffusers(pipeline: Any, image: Image, parameters: WanParameters, **more: Any) -> Any:
    """Call a WanImageToVideoPipeline as its users do; return the frames of each video.

    The pipeline's scheduler is replaced by one with the shift of the parameters. `more` are other arguments of the
    pipeline, which override those from the parameters.
    """
    kind = type(pipeline.scheduler)
    shift = {SHIFT_SETTINGS[kind.__name__]: parameters.flow_shift}
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **shift)
    same = ("prompt", "negative_prompt", "height", "width", "num_frames", "guidance_scale", "guidance_scale_2")
    arguments = {name: getattr(parameters, name) for name in same}
    arguments |= {
        "num_inference_steps": parameters.steps,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
        "output_type": "pil",
    }
    return pipeline(image, **(arguments | more)).frames
