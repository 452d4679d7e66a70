"""Wan as a family: three kinds of image-to-video models behind one class of diffusers. Does not import torch.

2.2 I2V-A14B has two experts, 2.1 I2V-14B one transformer and CLIP's image encoder, and 2.2 TI2V-5B one transformer that
gets the photo as its first latent frame.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.models.folder_check import class_in
from svdq.pipeline.models.folder_files import read_json
from svdq.pipeline.models.memory import ITEM_BYTES, VAE_COPIES, Activity, Shape
from svdq.pipeline.models.wan import defaults
from svdq.pipeline.models.wan.defaults import Defaults
from svdq.pipeline.models.wan.layout import (
    LAYOUT,
    SHIFT_SETTINGS,
    TEXT_AND_IMAGE_LAYOUT,
    TRANSFORMER_DEFAULTS,
    VAE_DEFAULTS,
)
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.costs import CostPrior

#: The facts of Wan 2.2 I2V-A14B as published.
PUBLISHED: Facts = {
    "boundary_ratio": 0.9,
    "expand_timesteps": False,
    "has_image_encoder": False,
    "scheduler": {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": defaults.CONVERTED_SHIFT,
    },
    "transformer": TRANSFORMER_DEFAULTS | {"in_channels": 36},
    "vae": VAE_DEFAULTS,
}

# Elements alive at the peak, besides the weights: counted on the published modules with tensors without contents and
# attention as a fused kernel. The table is in docs/internals/performance.md.
#: A step, for each token and unit of the transformer's width; more with a timestep for each token (TI2V-5B).
STEP_ELEMENTS = {False: 11.2, True: 32.7}
#: A decode of the VAE, which works frame by frame: per pixel, and per pixel of all frames.
DECODE_ELEMENTS, FRAME_ELEMENTS = {False: 4870, True: 5380}, 3.1
#: A decode in tiles: pixels of a tile; and per pixel of all frames the overlapping tiles, their joined rows, the whole
#: and its clamped copy.
TILE_PIXELS, TILED_FRAME_ELEMENTS = 256 * 256, 14.3
#: An encode, per pixel: with two experts or CLIP, of the photo and as many gray frames as a video of 81 has; of
#: TI2V-5B the photo only.
ENCODE_ELEMENTS = {False: 4020, True: 2050}
#: Bytes of an element of the VAE, which computes in float32, with what cuDNN copies of it.
_VAE_ITEM_BYTES = 4 * VAE_COPIES


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


def complete(parameters: VideoParameters, facts: Facts) -> WanParameters:
    """Fill in what parameters leave open.

    Raises:
        InputError: this model cannot make such a video.
    """
    assert isinstance(parameters, WanParameters)
    ours = _defaults(facts)
    usual = {name: value for name, value in vars(ours).items() if getattr(parameters, name, "") is None}
    parameters = parameters.model_copy(update=usual)
    assert parameters.width is not None
    assert parameters.height is not None
    pixels = parameters.width * parameters.height
    # What the VAE and the patches make one token.
    multiple = facts["vae"]["scale_factor_spatial"] * facts["transformer"]["patch_size"][1]
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
    if parameters.flow_shift is None:
        parameters = parameters.model_copy(update={"flow_shift": _shift(pixels, facts["scheduler"], ours)})
    return parameters


def _defaults(facts: Facts) -> Defaults:
    """Return the authors' defaults for a model."""
    if facts["boundary_ratio"] is not None:
        return defaults.I2V_A14B
    return defaults.TI2V_5B if facts["expand_timesteps"] else defaults.I2V_14B


def _shift(pixels: int, scheduler: Mapping[str, Any], ours: Defaults) -> float:
    """Return the shift of the model's own scheduler, or the authors' where diffusers' conversion wrote its default."""
    setting = SHIFT_SETTINGS[scheduler["_class_name"]]
    own = scheduler.get(setting)
    if own is not None and (setting, own) != ("flow_shift", defaults.CONVERTED_SHIFT):
        return float(own)
    return ours.shift_480p if pixels <= defaults.PIXELS_480P else ours.shift


def prior(facts: Facts) -> CostPrior:
    """Return a guess from the sizes of the modules: nothing has been measured yet."""
    if facts["expand_timesteps"]:
        # It encodes one frame only, and decodes 121 of them at 1280x704 between cheap steps.
        return CostPrior(encode_steps=0.1, decode_steps=1.5)
    return CostPrior(encode_steps=0.3, decode_steps=0.5)


def memory(activity: Activity, shape: Shape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `Family.memory`.

    The two passes of guidance come one after the other, so guidance needs no more memory.
    """
    transformer, vae, is_expanded = facts["transformer"], facts["vae"], facts["expand_timesteps"]
    pixels = shape[0] * shape[1]
    # The published VAE has 96 channels at full resolution; that of TI2V-5B has 256 for each patch of 2x2 pixels.
    width = (vae.get("decoder_base_dim") or vae["base_dim"]) / (256 if is_expanded else 96)
    if activity == "encode":
        return int(pixels * ENCODE_ELEMENTS[is_expanded] * width * _VAE_ITEM_BYTES)
    frames = shape[2]
    if activity == "decode" and shape[3] < frames and pixels > TILE_PIXELS:
        tile = TILE_PIXELS * DECODE_ELEMENTS[is_expanded] * width
        return int((tile + pixels * frames * TILED_FRAME_ELEMENTS) * _VAE_ITEM_BYTES)
    if activity == "decode":
        return int(pixels * (DECODE_ELEMENTS[is_expanded] * width + FRAME_ELEMENTS * frames) * _VAE_ITEM_BYTES)
    latent_frames = (frames - 1) // vae["scale_factor_temporal"] + 1
    side = vae["scale_factor_spatial"] * transformer["patch_size"][1]
    tokens = latent_frames * pixels // side**2
    hidden = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    return int(tokens * hidden * STEP_ELEMENTS[is_expanded] * ITEM_BYTES[dtype])


FAMILY = Family(
    name="wan",
    parameters=WanParameters,
    layouts={layout.pipeline: layout for layout in (LAYOUT, TEXT_AND_IMAGE_LAYOUT)},
    model="svdq.pipeline.models.wan.model:WanModel",
    tiny="svdq.pipeline.models.wan.tiny:write_tiny_wan",
    find_segments="svdq.pipeline.models.wan.denoiser:segments",
    encoded=("prompt_embeds", "condition"),
    half="bf16",
    published_as="wan2",
    published=PUBLISHED,
    read_facts=read_facts,
    complete=complete,
    prior=prior,
    memory=memory,
)
