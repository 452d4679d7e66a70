"""Finds weights of a model that are not finite, to explain results that are not finite."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.compute import stored_parts
from svdq.pipeline.models.model import VideoModel

#: The components of a pipeline that have weights.
_COMPONENTS = ("unet", "vae", "image_encoder")


def first_not_finite(pipeline: Any) -> str:
    """Name the first weight of a diffusers pipeline that is NaN or infinite, such as `unet (conv_in.weight)`, or ""."""
    for component in _COMPONENTS:
        module = getattr(pipeline, component)
        for name, weight in () if module is None else chain(module.named_parameters(), module.named_buffers()):
            if not all(_is_finite(part) for part in stored_parts(weight)):
                return f"{component} ({name})"
    return ""


def blame(model: VideoModel, dtype: torch.dtype) -> str:
    """Return the end of a sentence about NaN or infinite numbers: the cause, if it is a weight, and what to do.

    Args:
        model: the model that computed them.
        dtype: the dtype it computes in.
    """
    if weight := model.broken_weights():
        return f": the weights of {weight} are not finite; fetch the model {model.info.name} again."
    return "; try another seed, or float32 in place of float16." if dtype == torch.float16 else "; try another seed."


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # aminmax propagates NaN.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all())
