"""Stable Video Diffusion as a family. Does not import torch."""

from pathlib import Path

from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.models.folder_files import read_json
from svdq.pipeline.models.memory import ITEM_BYTES, VAE_COPIES, Activity, Shape
from svdq.pipeline.models.svd.layout import LAYOUT, UNET_DEFAULTS
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.costs import CostPrior

# Elements (of the dtype computed in) alive at the peak, besides the weights. Taken from the published modules with
# attention as a fused kernel; the table is in docs/internals/performance.md.
#: A step, for each pixel and frame, without and with guidance.
STEP_ELEMENTS = {1: 136, 2: 282}
#: An encode, per pixel.
ENCODE_ELEMENTS = 655
#: A decode, per pixel: times the frames decoded at a time, and times all frames.
DECODE_ELEMENTS, FRAME_ELEMENTS = 1021, 3.2
#: Bytes of the VAE's weights in float32, to which an encode in float16 converts them.
VAE_ENCODER_BYTES, VAE_DECODER_BYTES = 137_000_000, 254_000_000


#: `num_frames`, with which SVD-XT was trained, and the width of CLIP's projection.
PUBLISHED = {setting: UNET_DEFAULTS[setting] for setting in ("num_frames", "cross_attention_dim")}


def read_facts(folder: Path, name: str) -> Facts:
    """Return what PUBLISHED has, of the model in a checked folder.

    Raises:
        InputError: the config of the UNet cannot be read.
    """
    config = UNET_DEFAULTS | read_json(folder, "unet/config.json", name)
    return {setting: config[setting] for setting in PUBLISHED}


def complete(parameters: VideoParameters, facts: Facts) -> VideoParameters:
    """Fill in the number of frames."""
    if parameters.frames is not None:
        return parameters
    return parameters.model_copy(update={"frames": facts["num_frames"]})


def prior(facts: Facts) -> CostPrior:
    """Return what was measured on an H100 at 576x1024x25."""
    return CostPrior(encode_steps=0.18, decode_steps=4.4)


def memory(activity: Activity, shape: Shape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `Family.memory`."""
    pixels = shape[0] * shape[1]
    if activity == "encode":
        elements = pixels * ENCODE_ELEMENTS * VAE_COPIES
        if dtype != "float16":
            return int(elements * ITEM_BYTES[dtype])
        # The VAE overflows in float16, so all of it on this rank is converted temporarily.
        return int(elements * 4) + VAE_ENCODER_BYTES + VAE_DECODER_BYTES * has_decoder
    frames = shape[2]
    if activity == "step":
        return pixels * frames * STEP_ELEMENTS[shape[3]] * ITEM_BYTES[dtype]
    elements = pixels * (DECODE_ELEMENTS * shape[3] + FRAME_ELEMENTS * frames) * VAE_COPIES
    return int(elements * ITEM_BYTES[dtype])


FAMILY = Family(
    name="svd",
    parameters=SvdParameters,
    layouts={LAYOUT.pipeline: LAYOUT},
    model="svdq.pipeline.models.svd.model:SvdModel",
    tiny="svdq.pipeline.models.svd.tiny:write_tiny_model",
    find_segments="svdq.pipeline.models.svd.denoiser:segments",
    encoded=("image_latents",),
    half="fp16",
    published_as="stable-video-diffusion",
    published=PUBLISHED,
    read_facts=read_facts,
    complete=complete,
    prior=prior,
    memory=memory,
)
