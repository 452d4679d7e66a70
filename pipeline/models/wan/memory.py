"""Estimates the memory of Wan from the size of a video and the widths of the model. Does not import torch."""

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.memory import Activity, Shape
from svdq.pipeline.models.wan.layout import TRANSFORMER_DEFAULTS, VAE_DEFAULTS

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
#: Bytes of an element; the VAE computes in float32.
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_VAE_ITEM_BYTES = 4


def memory(activity: Activity, shape: Shape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `Family.memory`.

    The two passes of guidance come one after the other, so guidance needs no more memory.
    """
    transformer = TRANSFORMER_DEFAULTS | dict(facts.get("transformer", {}))
    vae = VAE_DEFAULTS | dict(facts.get("vae", {}))
    is_expanded = bool(facts.get("expand_timesteps"))
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
    return int(tokens * hidden * STEP_ELEMENTS[is_expanded] * _ITEM_BYTES[dtype])
