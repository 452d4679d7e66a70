"""Dequantizes ComfyUI's formats by comfy-kitchen, the library that ComfyUI computes with."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.weights.comfy_quant import DATA, SCALE, SECOND_SCALE, Mark


def dequantize_of(mark: Mark) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return what makes a weight of its tensors, which `check_tensors` has accepted; float32."""
    settings: dict[str, Any] = {"convrot_groupsize": mark.group} if mark.group else {}
    if mark.group and mark.format.is_rotated is None:
        settings["convrot"] = True
    return partial(_dequantize, mark, settings)


def _dequantize(mark: Mark, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    data, scale, packed = tensors[DATA], tensors[SCALE], mark.format.packed
    if mark.format.scale_view:
        scale = scale.view(getattr(torch, mark.format.scale_view))
    else:  # one a row, or one
        scale = scale.to(torch.float32).reshape(-1).expand(len(data)).contiguous()
        scale = scale if packed > 1 else scale.reshape(-1, 1)
    if SECOND_SCALE in tensors:
        settings = {**settings, "block_scale": scale}
        scale = tensors[SECOND_SCALE].to(torch.float32).reshape(())
    shape = (data.shape[0], data.shape[1] * packed)
    layout = _layouts()[mark.format.layout]
    params = layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=shape, **settings)
    made: Tensor = layout.dequantize(data.contiguous(), params)
    return made


@cache
def _layouts() -> Mapping[str, Any]:
    """Import comfy-kitchen, with the backends that ComfyUI uses: no Triton, and CUDA's from 13 on."""
    import comfy_kitchen
    from comfy_kitchen.tensor.base import LAYOUTS

    comfy_kitchen.registry.disable("triton")
    if int((torch.version.cuda or "0").partition(".")[0]) < 13:
        comfy_kitchen.registry.disable("cuda")
    layouts: Mapping[str, Any] = LAYOUTS
    return layouts
