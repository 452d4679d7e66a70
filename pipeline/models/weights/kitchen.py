"""Dequantizes ComfyUI's formats, and multiplies in them, by comfy-kitchen, the library that ComfyUI computes with."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from svdq.pipeline.models.weights.comfy_quant import (
    DATA,
    ON_PROCESSORS,
    SCALE,
    SECOND_SCALE,
    Mark,
    formats_of_gpu,
)

#: Multiplies rows by a weight, as its tensors, and adds a bias.
Multiply = Callable[[Tensor, Mapping[str, Tensor], Tensor | None], Tensor]
_MAX_GROUP: Final = 256  # numbers that ConvRot rotates together, in published files
_MAX_NVFP4: Final = 448 * 6  # largest scale of a block times largest number in it


def native_formats(device: torch.device) -> frozenset[str]:
    """Return the titles of the formats that a device multiplies in.

    Of several visible GPUs, all have the kernels: ranks of a group must compute alike, whichever of them they are on.
    """
    if device.type != "cuda":
        return ON_PROCESSORS
    if torch.version.hip is not None:
        return frozenset()  # its capabilities count otherwise
    of_gpus = formats_of_gpu(min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))))
    return of_gpus if _has_kernels() else of_gpus & {"fp8"}  # whose products are torch's own


def dequantize_of(mark: Mark) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return what makes a weight of its tensors, which `check_tensors` has accepted; float32."""
    return partial(_dequantize, mark)


def _dequantize(mark: Mark, tensors: Mapping[str, Tensor]) -> Tensor:
    settings: dict[str, Any] = {"convrot_groupsize": mark.group} if mark.group else {}
    if mark.group and mark.format.is_rotated is None:
        settings["convrot"] = True
    data, scale, packed = tensors[DATA], tensors[SCALE], mark.format.packed
    if mark.format.scale_view:
        scale = scale.view(getattr(torch, mark.format.scale_view))
    else:  # one a row, or one
        scale = scale.to(torch.float32).reshape(-1).expand(len(data)).contiguous()
        scale = scale if packed > 1 else scale.reshape(-1, 1)
    if SECOND_SCALE in tensors:
        settings["block_scale"] = scale
        scale = tensors[SECOND_SCALE].to(torch.float32).reshape(())
    shape = (data.shape[0], data.shape[1] * packed)
    layout = _layouts()[mark.format.layout]
    params = layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=shape, **settings)
    made: Tensor = layout.dequantize(data.contiguous(), params)
    return made


def quantize(weight: Tensor) -> tuple[Mark, dict[str, Tensor]]:
    """Quantize a matrix to int8 by rows, with ConvRot where the length of its rows allows it, as published files are.

    Return its mark and the tensors that store it.
    """
    group = next((4**n for n in range(4, 0, -1) if 4**n <= _MAX_GROUP and weight.shape[1] % 4**n == 0), 0)
    settings = {"convrot": True, "convrot_groupsize": group} if group else {}
    data, params = _layouts()["TensorWiseINT8Layout"].quantize(weight.contiguous(), per_channel=True, **settings)
    return Mark(name="int8_tensorwise", group=group), {DATA: data, SCALE: params.scale}


def multiply_of(mark: Mark) -> Multiply:
    """Return what multiplies rows (M, K) by a weight (N, K) of such tensors in its format, and adds a bias (N): (M, N).

    It quantizes the rows to that format, too. comfy-kitchen's functions are called in place of its QuantizedTensor,
    which goes on in full precision, with other bits, after an error such as out of memory.
    """
    layouts = _layouts()
    if mark.format.title == "int8":
        return partial(_multiply_int8, bool(mark.group), mark.group or _MAX_GROUP)
    if mark.is_fp8:
        return partial(_multiply_fp8, layouts["TensorCoreFP8Layout"])
    return partial(_multiply_blocks, layouts[mark.format.layout], getattr(torch, mark.format.scale_view))


def _multiply_int8(
    is_rotated: bool, group: int, rows: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None
) -> Tensor:
    from comfy_kitchen.backends.eager.quantization import DTYPE_TO_CODE

    scale = tensors[SCALE].to(torch.float32)
    product: Tensor = torch.ops.comfy_kitchen.int8_linear(
        rows, tensors[DATA], scale, bias, DTYPE_TO_CODE[rows.dtype], is_rotated, group
    )
    return product


def _multiply_fp8(layout: Any, rows: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2

    scale = tensors[SCALE].to(torch.float32) if SCALE in tensors else torch.ones((), device=rows.device)
    quantized, params = layout.quantize(rows, scale=_scale_of(rows, torch.finfo(torch.float8_e4m3fn).max))
    product: Tensor = scaled_mm_v2(
        quantized, tensors[DATA].t(), params.scale, scale.reshape(()), bias, out_dtype=rows.dtype
    )
    return product


def _multiply_blocks(
    layout: Any, scale_dtype: torch.dtype, rows: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None
) -> Tensor:
    import comfy_kitchen

    quantized, params = layout.quantize(rows, scale=_scale_of(rows, _MAX_NVFP4))
    scale = tensors[SCALE].view(scale_dtype)
    if SECOND_SCALE in tensors:
        second = tensors[SECOND_SCALE].to(torch.float32).reshape(())
        scales = params.scale, second, params.block_scale, scale
        product: Tensor = comfy_kitchen.scaled_mm_nvfp4(quantized, tensors[DATA], *scales, bias, rows.dtype)
    else:
        product = comfy_kitchen.scaled_mm_mxfp8(quantized, tensors[DATA], params.scale, scale, bias, rows.dtype)
    return product[: len(rows)]  # quantizing pads them


def _scale_of(rows: Tensor, largest: float) -> Tensor:
    """Return the scale that makes the extremes of rows the largest number of a format; rows of zeros have one, too."""
    extreme = torch.stack(torch.aminmax(rows)).abs().amax() / largest
    return extreme.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)


def _has_kernels() -> bool:
    """Return whether comfy-kitchen's CUDA kernels suit this torch; else it computes by torch's operations."""
    return int((torch.version.cuda or "0").partition(".")[0]) >= 13


@cache
def _layouts() -> Mapping[str, Any]:
    """Import comfy-kitchen, with the backends that ComfyUI uses: no Triton, and CUDA's from 13 on."""
    import comfy_kitchen
    from comfy_kitchen.tensor.base import LAYOUTS

    comfy_kitchen.registry.disable("triton")
    if not _has_kernels():
        comfy_kitchen.registry.disable("cuda")
    layouts: Mapping[str, Any] = LAYOUTS
    return layouts
