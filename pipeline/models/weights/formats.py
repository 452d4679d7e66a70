"""The weights of one component by diffusers' names, as their files store them, and how each is dequantized.

They come from a folder of diffusers, or from one file as ComfyUI has it: safetensors, also quantized, or GGUF.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import FileNames
from svdq.pipeline.models.weights.comfy_quant import (
    DATA,
    PREFIXES,
    SCALE,
    Mark,
    check_tensors,
    implied_mark,
    marks_of,
    scale_keys,
)
from svdq.pipeline.models.weights.kitchen import dequantize_of
from svdq.pipeline.models.weights.loras import open_safetensors, tensor_of
from svdq.pipeline.models.weights.model_folder import NO_WEIGHTS, gguf_fields, gguf_tensors
from svdq.pipeline.models.weights.safetensors_file import SafetensorsFile


def plain(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a weight that is stored as it is."""
    return tensors[DATA]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A weight in a file, read when it is asked for."""

    num_elements: int
    read: Callable[[], dict[str, Tensor]]  # the tensors that store it, mapped where the file allows it
    dequantize: Callable[[Mapping[str, Tensor]], Tensor] = plain  # makes it of them, on their device
    mark: Mark | None = None  # the format in which a linear layer may multiply by it


def open_folder(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the weights in the safetensors files of a diffusers folder."""
    found: dict[str, Stored] = {}
    for file in files:
        found |= _open_safetensors(file)
    return found


def open_file(
    file: Path, names: Collection[str], rename: Callable[[str], str], raised_norms: Collection[str] = ()
) -> dict[str, Stored]:
    """Return the weights in a file of safetensors or GGUF, by the `names` of diffusers.

    `rename` converts the original name of a weight to diffusers'; `raised_norms` is as in `FileNames`. Raises
    InputError for other files, and for weights that would be read wrongly.
    """
    renamed = {}
    is_gguf = file.suffix == ".gguf"
    for name, stored in (_open_gguf(file, raised_norms) if is_gguf else _open_safetensors(file)).items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        renamed[name if name in names else rename(name)] = stored
    return renamed


def _open_safetensors(file: Path) -> dict[str, Stored]:
    tensors = open_safetensors(file, "weights file")
    marks = marks_of(tensors)
    found: dict[str, Stored] = {}
    quantized = set()  # modules whose weights mean nothing without what is beside them
    for key, entry in tensors.entries.items():
        module, _, kind = key.rpartition(".")
        if kind in NO_WEIGHTS or key in NO_WEIGHTS:
            continue
        mark, scales = (marks.get(module), scale_keys(tensors, module)) if kind == "weight" else (None, {})
        native = None
        if kind == "weight" and (mark is not None or entry.dtype.startswith(("F8", "I", "U", "BOOL"))):
            quantized.add(module)
            _check(tensors, module, mark, scales, is_marked=bool(marks))
            native = mark or implied_mark(tensors, module)
            if native is not None and native.is_fp8 and SCALE in scales:
                # comfy-kitchen multiplies fp8 by one scale.
                native = native if math.prod(tensors.entries[scales[SCALE]].shape) == 1 else None
        packed = 1
        how: Callable[[Mapping[str, Tensor]], Tensor]
        how = scaled if scales else unrounded if entry.dtype.startswith("F8") else plain
        if mark is not None and not mark.is_fp8:
            packed, how = mark.format.packed, dequantize_of(mark)
        read = partial(_read, tensors, {DATA: key} | scales)
        found[key] = Stored(num_elements=math.prod(entry.shape) * packed, read=read, dequantize=how, mark=native)
    for key in found:
        if key.endswith((".weight", ".bias")):
            continue
        if beside := next((module for module in quantized if key.startswith((f"{module}.", f"{module}_"))), ""):
            raise InputError(
                f"The weights file {file} has {key} beside {beside}.weight, of which svdq does not know how it changes "
                "that; give weights in bf16, fp8 (scale_weight or weight_scale) or GGUF."
            )
    return found


def _read(tensors: SafetensorsFile, keys: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: tensor_of(tensors, key) for name, key in keys.items()}


def _check(
    tensors: SafetensorsFile, module: str, mark: Mark | None, scales: Mapping[str, str], *, is_marked: bool
) -> None:
    """Raise an InputError for a quantized weight that would be read wrongly."""
    file, weight = tensors.path, tensors.entries[f"{module}.weight"]
    if mark is not None:
        check_tensors(tensors, module, mark)
    elif is_marked and weight.dtype == "I8":
        raise InputError(
            f"The weights file {file} has {module}.weight of I8 without a mark of its format, which others in it have; "
            "get the file again."
        )
    elif weight.dtype.startswith(("I", "U", "BOOL")) and (weight.dtype != "I8" or SCALE not in scales):
        lacks = "a mark of its format" if scales else "a scale"
        raise InputError(
            f"The weights file {file} has {module}.weight of {weight.dtype} without {lacks}, which svdq cannot "
            "read; give weights in bf16, fp8, int8 or GGUF."
        )
    for key in scales.values():
        scale = tensors.entries[key]
        if mark is None and not scale.is_float:
            raise InputError(
                f"The weights file {file} has {key} of {scale.dtype} without a mark of the format, which svdq cannot "
                "read; get the file again."
            )
        if key == scales.get(SCALE) and (mark is None or mark.is_fp8) and not _is_known(scale.shape, weight.shape):
            raise InputError(
                f"The weights file {file} has {key} of shape {list(scale.shape)} for a weight of {list(weight.shape)}, "
                "and svdq reads one scale for all, one a row, or one a block; give other weights."
            )
        if scale.is_float and not bool((values := tensor_of(tensors, key)).isfinite().all() and values.all()):
            raise InputError(
                f"The weights file {file} has {key} with a scale of 0 or one that is not finite; get the file again."
            )


def _is_known(factors: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether `scaled` can apply scales of a shape: one for all, one a row, or one a block of a matrix."""
    if math.prod(factors) == 1 or (math.prod(factors) == factors[0] == shape[0]):
        return True
    is_matrix = len(factors) == len(shape) == 2
    return is_matrix and all(size % number == 0 for number, size in zip(factors, shape, strict=True))


def unrounded(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a weight that is stored in fp8 without a scale; float32."""
    return tensors[DATA].to(torch.float32)


def scaled(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a weight that is stored in fp8 as a fraction of a scale; float32."""
    weight, factor = unrounded(tensors), tensors[SCALE].to(torch.float32)
    if factor.ndim == 2 and weight.ndim == 2 and factor.numel() not in (1, len(weight)):  # one a block
        rows, columns = (size // number for size, number in zip(weight.shape, factor.shape, strict=True))
        factor = factor.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    elif factor.ndim:  # one for all, or one a row
        factor = factor.reshape(-1, *(1,) * (weight.ndim - 1))
    return weight * factor


def _open_gguf(file: Path, raised_norms: Collection[str]) -> dict[str, Stored]:
    from diffusers.quantizers.gguf.utils import dequantize_functions

    found = {}
    architecture = gguf_fields(file).get("general.architecture")
    is_raised = architecture is not None and architecture.contents() in raised_norms
    for tensor in gguf_tensors(file):
        if not (tensor.tensor_type in dequantize_functions or tensor.data.dtype.kind == "f"):
            raise InputError(
                f"The weights file {file} has {tensor.name} as {tensor.tensor_type.name}, which diffusers cannot read; "
                "give another quantization, such as Q4_K_M."
            )
        read = partial(_mapped, tensor.data)
        how: Callable[[Mapping[str, Tensor]], Tensor] = partial(_of_blocks, int(tensor.tensor_type))
        if is_raised and tensor.name.endswith("norm.weight"):
            how = partial(_without_one, how)
        found[tensor.name] = Stored(num_elements=int(tensor.n_elements), read=read, dequantize=how)
    return found


def _without_one(how: Callable[[Mapping[str, Tensor]], Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of a norm to which llama.cpp's conversion has added 1."""
    return how(tensors).to(torch.float32) - 1


def _mapped(data: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():  # the mapped file cannot be written, and nobody writes
        warnings.simplefilter("ignore")
        return {DATA: torch.from_numpy(data)}


def _of_blocks(kind: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a weight that GGUF stores in blocks of a type; float32, or as it is stored."""
    from diffusers.quantizers.gguf import utils
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    data, quantization = tensors[DATA], GGMLQuantizationType(kind)
    if data.is_floating_point():
        return data
    block_size, num_bytes = GGML_QUANT_SIZES[quantization]
    blocks = data.reshape(-1, num_bytes)
    made: Tensor = utils.dequantize_functions[quantization](blocks, block_size, num_bytes, dtype=torch.float32)
    return made


def empty_component(kind: Any, config: Mapping[str, Any]) -> Any:
    """Create a component without memory for its weights; its buffers have their values."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        if hasattr(kind, "config_class"):  # of transformers
            return kind(kind.config_class.from_dict(dict(config)))
        return kind.from_config(dict(config))


def without(model: Any, modules: Collection[str]) -> None:
    """Remove modules from a component by the last part of their names."""
    for place, module in list(model.named_modules()):
        parent, _, name = place.rpartition(".")
        if name in modules and module is not None:
            setattr(model.get_submodule(parent), name, None)


def shapes_of(model: Any) -> dict[str, torch.Size]:
    """Return the shapes of a component's weights by name, each once: some have a second name."""
    tied = {*(getattr(model, "_tied_weights_keys", None) or ())}
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}


def renaming(kind: Any, names: FileNames) -> Callable[[str], str]:
    """Return the conversion of names in files to the names in a class of diffusers or transformers."""
    convert = _conversion(kind)

    def rename(name: str) -> str:
        return _replaced(convert(_replaced(name, names.originals)), names.renames)

    return rename


def _replaced(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, ours in patterns.items():
        name = re.sub(pattern, ours, name)
    return name


def _conversion(kind: Any) -> Callable[[str], str]:
    if hasattr(kind, "config_class"):
        # Versions of transformers differ in whether CLIP's names have the prefix.
        return lambda name: name.removeprefix("vision_model.")
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    convert = SINGLE_FILE_LOADABLE_CLASSES.get(kind.__name__, {}).get("checkpoint_mapping_fn")
    # It renames the keys of a dict, leaves the values alone, and drops the keys of other components.
    return (lambda name: str(next(iter(convert({name: name})), name))) if convert else str
