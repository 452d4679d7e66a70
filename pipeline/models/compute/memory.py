"""The shapes by which memory is estimated. Does not import torch."""

from typing import Literal, get_args

from svdq.pipeline.video_parameters import VideoParameters

Activity = Literal["encode", "step", "decode"]  # activities that are estimated and measured separately
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
#: What a rank does with a video one after the other, and for which it may load what it needs: also the embedding of its
#: prompt, whose activations are small.
Phase = Literal["embed", "encode", "step", "decode"]
#: What leaves the device of the rank that encodes while it is not in use: nothing; the text encoder; or that and the
#: expert, during embeds and encodes.
Leaves = Literal["nothing", "text", "experts"]

RESERVE_BYTES = 500_000_000  # of a GPU for fragments and CUDA's context; a guess, never measured
CONTEXT_BYTES = 800_000_000  # of CUDA itself on a GPU. A guess.
WORKSPACE_BYTES = 1_000_000_000  # workspace of cuDNN and cuBLAS in bytes, added to estimates on GPUs. A guess.
#: Factor on what the operations of a VAE hold, for the copies that cuDNN makes to convolve with channels last: ComfyUI
#: plans 1.37 times as much for a decode at 832x480. Until a card says otherwise.
VAE_COPIES = 1.4

MemoryShape = tuple[int, ...]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element, by torch's name of its dtype


def size_text(num_bytes: int) -> str:
    """Format a number of bytes with one decimal."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def chunk_of(parameters: VideoParameters) -> int:
    """Return the number of frames that are decoded at a time."""
    return min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)


def shape_for(activity: Activity, parameters: VideoParameters) -> MemoryShape:
    """Return what determines the memory of an activity: size, frames, and passes of a step or chunk of a decode.

    A step has a fifth number where steps are skipped: of how many passes it keeps the residual.
    """
    width, height, frames = parameters.width, parameters.height, parameters.num_frames
    if activity == "encode":
        return (width, height)
    if activity == "decode":
        return (width, height, frames, chunk_of(parameters))
    passes = 1 + parameters.guided
    return (width, height, frames, passes, *((passes,) if getattr(parameters, "step_cache", 0.0) else ()))
