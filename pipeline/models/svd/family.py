"""Stable Video Diffusion as a family. Does not import torch."""

from pathlib import Path

from svdq.pipeline.costs import CostPrior
from svdq.pipeline.models.family import Facts, Family, Segment
from svdq.pipeline.models.files import read_json
from svdq.pipeline.models.svd.layout import LAYOUT, UNET_DEFAULTS
from svdq.pipeline.models.svd.memory import memory
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.parameters import VideoParameters


def read_facts(folder: Path, name: str) -> Facts:
    """Return `num_frames`, with which the model was trained, and the width of CLIP's projection.

    Raises:
        InputError: the config of the UNet cannot be read.
    """
    config = UNET_DEFAULTS | read_json(folder, "unet/config.json", name)
    return {setting: config[setting] for setting in ("num_frames", "cross_attention_dim")}


def complete(parameters: VideoParameters, facts: Facts) -> VideoParameters:
    """Fill in the number of frames."""
    if parameters.frames is not None:
        return parameters
    return parameters.model_copy(update={"frames": facts.get("num_frames", UNET_DEFAULTS["num_frames"])})


def segments(parameters: VideoParameters, facts: Facts) -> tuple[Segment, ...]:
    """Return one segment: the UNet does all steps."""
    return (Segment(component="unet", start=0, stop=parameters.steps),)


def prior(facts: Facts) -> CostPrior:
    """Return what was measured on an H100 at 576x1024x25."""
    return CostPrior(encode_steps=0.18, decode_steps=4.4)


FAMILY = Family(
    name="svd",
    parameters=SvdParameters,
    layouts={LAYOUT.pipeline: LAYOUT},
    model="svdq.pipeline.models.svd.model:SvdModel",
    tiny="svdq.pipeline.models.svd.tiny:write_tiny_model",
    encoded=("image_latents",),
    half="fp16",
    read_facts=read_facts,
    complete=complete,
    segments=segments,
    prior=prior,
    memory=memory,
)
