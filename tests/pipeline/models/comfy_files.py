"""Quantized weights as ComfyUI's files have them, made by comfy-kitchen."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A format of ComfyUI."""

    layout: str  # of comfy-kitchen
    mark: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of comfy-kitchen's quantize
    multiple: int = 1  # what the columns of a matrix are a multiple of
    is_padded: bool = False  # whether comfy-kitchen pads rows that are no multiple of it


def _convrot(group: int) -> Kind:
    settings = {"convrot": True, "convrot_groupsize": group}
    return Kind(
        layout="TensorWiseINT8Layout",
        mark={"format": "int8_tensorwise"} | settings,
        settings=settings | {"per_channel": True},
        multiple=group,
    )


KINDS = {
    "int8": Kind(layout="TensorWiseINT8Layout", mark={"format": "int8_tensorwise", "full_precision_matrix_mult": True}),
    "int8 by rows": Kind(
        layout="TensorWiseINT8Layout", mark={"format": "int8_tensorwise"}, settings={"per_channel": True}
    ),
    "int8 ConvRot": _convrot(256),
    "int8 ConvRot in 16s": _convrot(16),
    "fp8": Kind(layout="TensorCoreFP8Layout", mark={"format": "float8_e4m3fn"}),
    "mxfp8": Kind(layout="TensorCoreMXFP8Layout", mark={"format": "mxfp8"}, multiple=32, is_padded=True),
    "nvfp4": Kind(layout="TensorCoreNVFP4Layout", mark={"format": "nvfp4"}, multiple=16, is_padded=True),
    "W4A4 ConvRot": Kind(
        layout="TensorCoreConvRotW4A4Layout", mark={"format": "convrot_w4a4", "convrot_groupsize": 64},
        settings={"convrot_groupsize": 64}, multiple=64,
    ),
}  # fmt: skip


def quantized(weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that store a weight, by what follows its name, and what comfy-kitchen makes of them."""
    from comfy_kitchen.tensor import QuantizedTensor

    made: Any = QuantizedTensor.from_float(weight, kind.layout, **kind.settings)
    stored = made.layout_cls.state_dict_tensors(made._qdata, made._params)
    # Files have the exponents of mxfp8 as bytes.
    bits = {end: each.view(torch.uint8) if "e8m0" in str(each.dtype) else each for end, each in stored.items()}
    return bits, made.dequantize()


def save_quantized(
    path: Path,
    weights: Mapping[str, Tensor],
    kind: str,
    rename: Callable[[str], str],
    *,
    prefix: str = "",
    in_header: bool = False,
    is_quantized: Callable[[str], bool] = lambda name: "blocks." in name,
) -> dict[str, Tensor]:
    """Write weights under original names, with marks beside them or in the header; return what they are then."""
    tensors: dict[str, Tensor] = {}
    marks: dict[str, Mapping[str, Any]] = {}
    kept = dict(weights)
    for name, weight in weights.items():
        original, multiple = f"{prefix}{rename(name)}", KINDS[kind].multiple
        sides = weight.shape if KINDS[kind].is_padded else weight.shape[1:]
        is_matrix = weight.ndim == 2 and name.endswith(".weight") and is_quantized(name)
        if not is_matrix or any(side % multiple for side in sides):
            tensors[original] = weight.contiguous()
            continue
        bits, kept[name] = quantized(weight.float(), KINDS[kind])
        tensors |= {f"{original}{end}": each.contiguous() for end, each in bits.items()}
        marks[original.removesuffix(".weight")] = KINDS[kind].mark
    assert marks
    if in_header:  # ComfyUI looks for names without the prefix there
        layers = {name.removeprefix(prefix): mark for name, mark in marks.items()}
        save_file(tensors, path, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})})
    else:
        notes = {f"{name}.comfy_quant": json.dumps(mark).encode() for name, mark in marks.items()}
        save_file(tensors | {name: torch.tensor(list(each), dtype=torch.uint8) for name, each in notes.items()}, path)
    return kept
