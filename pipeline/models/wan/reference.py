"""Renders with diffusers' own WanImageToVideoPipeline, to compare its bits."""

from typing import Any

import torch
from PIL.Image import Image

from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.models.wan.schedule import SHIFT_SETTINGS


def call_diffusers(pipeline: Any, image: Image, parameters: WanParameters, **more: Any) -> Any:
    """Call a WanImageToVideoPipeline as its users do; return the frames of each video.

    Args:
        pipeline: the pipeline; its scheduler is replaced by one with the shift of the parameters.
        image: a photo of the video's size.
        parameters: of the video, completed.
        more: other arguments of the pipeline, which override those from the parameters.
    """
    kind = type(pipeline.scheduler)
    shift = {SHIFT_SETTINGS[kind.__name__]: parameters.flow_shift}
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **shift)
    arguments = {
        "prompt": parameters.prompt,
        "negative_prompt": parameters.negative_prompt,
        "height": parameters.height,
        "width": parameters.width,
        "num_frames": parameters.num_frames,
        "num_inference_steps": parameters.steps,
        "guidance_scale": parameters.guidance_scale,
        "guidance_scale_2": parameters.guidance_scale_2,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
        "output_type": "pil",
    }
    return pipeline(image, **(arguments | more)).frames
