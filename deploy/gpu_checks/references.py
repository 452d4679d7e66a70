"""Renders with diffusers' own pipelines as their users call them, to compare bits."""

from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.components import name_of
from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.model_folder import WEIGHTS, is_half, loaded_files
from svdq.pipeline.models.model_names import find_folder
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import SHIFT_SETTINGS


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
    parts = {"vae": AutoencoderKLWan.from_pretrained(folder / "vae", dtype=torch.float32)}
    if (folder / "image_encoder").is_dir():
        parts["image_encoder"] = CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32)
    return WanImageToVideoPipeline.from_pretrained(folder, **arguments, **parts)


def call_diffusers(pipeline: Any, image: Image, parameters: SvdParameters | WanParameters, **more: Any) -> Any:
    """Call a pipeline with the parameters of a video; return the frames of each video.

    `more` are other arguments of the pipeline, such as `last_image`, which override those from the parameters. The
    scheduler of a pipeline of Wan is replaced by one with the shift of the parameters.
    """
    if isinstance(parameters, SvdParameters):
        names = ["height", "width", "num_frames", "min_guidance_scale", "max_guidance_scale", "fps", "motion_bucket_id"]
        names += ["noise_aug_strength", "decode_chunk_size"]
    else:
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
