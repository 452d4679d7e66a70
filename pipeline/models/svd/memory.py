"""Estimates the memory of Stable Video Diffusion from the size of a video. Does not import torch."""

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.memory import Activity, Shape

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
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def memory(activity: Activity, shape: Shape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `Family.memory`."""
    pixels = shape[0] * shape[1]
    if activity == "encode":
        if dtype != "float16":
            return pixels * ENCODE_ELEMENTS * ITEM_BYTES[dtype]
        # The VAE overflows in float16, so all of it on this rank is converted temporarily.
        return pixels * ENCODE_ELEMENTS * 4 + VAE_ENCODER_BYTES + VAE_DECODER_BYTES * has_decoder
    frames = shape[2]
    if activity == "step":
        return pixels * frames * STEP_ELEMENTS[shape[3]] * ITEM_BYTES[dtype]
    return int(pixels * (DECODE_ELEMENTS * shape[3] + FRAME_ELEMENTS * frames) * ITEM_BYTES[dtype])
