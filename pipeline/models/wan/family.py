"""Wan as a family: three kinds of image-to-video models behind one class of diffusers. Does not import torch.

2.2 I2V-A14B has two experts, 2.1 I2V-14B one transformer and CLIP's image encoder, and 2.2 TI2V-5B one transformer that
gets the photo as its first latent frame.
"""

from pathlib import Path
from typing import Any

from svdq.pipeline.costs import CostPrior
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts, Family, Segment
from svdq.pipeline.models.files import read_json
from svdq.pipeline.models.folder_check import class_in
from svdq.pipeline.models.wan import defaults, schedule
from svdq.pipeline.models.wan.defaults import Defaults
from svdq.pipeline.models.wan.layout import LAYOUT, TEXT_AND_IMAGE_LAYOUT, TRANSFORMER_DEFAULTS, VAE_DEFAULTS
from svdq.pipeline.models.wan.memory import memory
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.parameters import VideoParameters

#: The facts of Wan 2.2 I2V-A14B as published, which count if no folder is known.
PUBLISHED: Facts = {
    "boundary_ratio": 0.9,
    "expand_timesteps": False,
    "has_image_encoder": False,
    "scheduler": {"_class_name": "UniPCMultistepScheduler", "flow_shift": defaults.CONVERTED_SHIFT},
    "transformer": TRANSFORMER_DEFAULTS | {"in_channels": 36},
    "vae": VAE_DEFAULTS,
}


def read_facts(folder: Path, name: str) -> Facts:
    """Return what PUBLISHED has, of the model in a checked folder.

    Raises:
        InputError: a config cannot be read.
    """
    index = read_json(folder, "model_index.json", name)
    return {
        "boundary_ratio": index.get("boundary_ratio"),
        "expand_timesteps": index.get("expand_timesteps") is True,
        "has_image_encoder": class_in(index, "image_encoder") is not None,
        "scheduler": read_json(folder, "scheduler/scheduler_config.json", name),
        "transformer": TRANSFORMER_DEFAULTS | read_json(folder, "transformer/config.json", name),
        "vae": VAE_DEFAULTS | read_json(folder, "vae/config.json", name),
    }


def defaults_of(facts: Facts) -> Defaults:
    """Return the authors' defaults for a model."""
    facts = {**PUBLISHED, **facts}
    if facts["boundary_ratio"] is not None:
        return defaults.I2V_A14B
    return defaults.TI2V_5B if facts["expand_timesteps"] else defaults.I2V_14B


def side_multiple(facts: Facts) -> int:
    """Return the number of pixels that sides must be a multiple of: what the VAE and the patches make one token."""
    facts = {**PUBLISHED, **facts}
    multiple: int = facts["vae"]["scale_factor_spatial"] * facts["transformer"]["patch_size"][1]
    return multiple


def complete(parameters: VideoParameters, facts: Facts) -> WanParameters:
    """Fill in what parameters leave open.

    Raises:
        InputError: this model cannot make such a video.
    """
    assert isinstance(parameters, WanParameters)
    facts = {**PUBLISHED, **facts}
    ours = defaults_of(facts)
    values: dict[str, Any] = {
        name: getattr(ours, name)
        for name in ("frames", "fps", "width", "height", "steps", "guidance_scale")
        if getattr(parameters, name) is None
    }
    parameters = parameters.model_copy(update=values)
    assert parameters.width is not None
    assert parameters.height is not None
    pixels = parameters.width * parameters.height
    multiple = side_multiple(facts)
    for side in ("width", "height"):
        if getattr(parameters, side) % multiple:
            raise InputError(
                f"The {side} of {getattr(parameters, side)} pixels is no multiple of {multiple}, as {ours.title} needs."
            )
    if facts["boundary_ratio"] is None:
        if parameters.guidance_scale_2 is not None:
            raise InputError(f"{ours.title} has one transformer, so it has no guidance_scale_2; leave that out.")
    elif parameters.guidance_scale_2 is None:
        # As in diffusers.
        parameters = parameters.model_copy(update={"guidance_scale_2": parameters.guidance_scale})
    if parameters.negative_prompt is None:
        parameters = parameters.model_copy(update={"negative_prompt": defaults.NEGATIVE_PROMPT})
    if parameters.flow_shift is None:
        parameters = parameters.model_copy(update={"flow_shift": _shift(pixels, facts)})
    return parameters


def _shift(pixels: int, facts: Facts) -> float:
    """Return the shift of the model's own scheduler, or the authors' where diffusers' conversion wrote its default."""
    scheduler, ours = facts["scheduler"], defaults_of(facts)
    setting = schedule.SHIFT_SETTINGS[scheduler["_class_name"]]
    own = scheduler.get(setting)
    if own is not None and (setting, own) != ("flow_shift", defaults.CONVERTED_SHIFT):
        return float(own)
    return ours.flow_shift_480p if pixels <= defaults.PIXELS_480P else ours.flow_shift


def boundary_timestep(facts: Facts) -> float | None:
    """Return the timestep at and above which the first expert works; None: there is one transformer."""
    facts = {**PUBLISHED, **facts}
    if facts["boundary_ratio"] is None:
        return None
    boundary: float = facts["boundary_ratio"] * facts["scheduler"].get("num_train_timesteps", 1000)
    return boundary


def segments(parameters: VideoParameters, facts: Facts) -> tuple[Segment, ...]:
    """Return which expert does which steps of a video; an expert without steps has no segment."""
    facts = {**PUBLISHED, **facts}
    completed = complete(parameters, facts)
    assert completed.steps is not None
    assert completed.flow_shift is not None
    of_steps = schedule.timesteps(completed.steps, completed.flow_shift, facts["scheduler"])
    return schedule.segments(schedule.components(of_steps, boundary_timestep(facts)))


def prior(facts: Facts) -> CostPrior:
    """Return a guess from the sizes of the modules: nothing has been measured yet."""
    if {**PUBLISHED, **facts}["expand_timesteps"]:
        # It encodes one frame only, and decodes 121 of them at 1280x704 between cheap steps.
        return CostPrior(encode_steps=0.1, decode_steps=1.5)
    return CostPrior(encode_steps=0.3, decode_steps=0.5)


FAMILY = Family(
    name="wan",
    parameters=WanParameters,
    layouts={layout.pipeline: layout for layout in (LAYOUT, TEXT_AND_IMAGE_LAYOUT)},
    model="svdq.pipeline.models.wan.model:WanModel",
    tiny="svdq.pipeline.models.wan.tiny:write_tiny_wan",
    encoded=("prompt_embeds", "condition"),
    half="bf16",
    read_facts=read_facts,
    complete=complete,
    segments=segments,
    prior=prior,
    memory=memory,
)
