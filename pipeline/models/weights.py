"""The weights of one component by diffusers' names, read and converted one at a time.

They come from a folder of diffusers, or from one file as ComfyUI has it: safetensors, also `fp8_scaled`, or GGUF. LoRAs
are added before a weight is rounded to the dtype computed in, so the memory never holds a component twice.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.loras import Lora, open_safetensors

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # what ComfyUI puts before the names of a denoiser
_SCALES = ("scale_weight", "weight_scale")  # scales of a weight in fp8, beside it; the older name and the newer one
#: Tensors in files of ComfyUI that are no weights: how the inputs of a layer are rounded, and markers of the format.
_NO_WEIGHTS = ("scale_input", "input_scale", "scaled_fp8", "comfy_quant", *_SCALES)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A weight in a file, read when it is asked for."""

    num_elements: int
    read: Callable[[], Tensor]


class Weights(dict[str, Tensor]):
    """The weights of a component; a dict for diffusers' loaders, but each is read when it is asked for."""

    def __init__(self, stored: Mapping[str, Stored], shapes: Mapping[str, torch.Size], loras: Sequence[Lora]) -> None:
        super().__init__(dict.fromkeys(stored))  # type: ignore[arg-type]
        self._stored = stored
        self._shapes = shapes
        self._loras = loras

    def __getitem__(self, name: str) -> Tensor:
        """Read a weight; float32 if a LoRA changes it."""
        weight = self._stored[name].read()
        if name in self._shapes:
            weight = weight.reshape(self._shapes[name])
        if any(name in lora.parts for lora in self._loras):
            weight = weight.to(torch.float32)
            for lora in self._loras:
                weight = lora.add(name, weight)
        return weight

    def items(self) -> Any:
        """Read the weights one after the other."""
        return ((name, self[name]) for name in self)


def open_folder(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the weights in the safetensors files of a diffusers folder."""
    found: dict[str, Stored] = {}
    for file in files:
        found |= _open_safetensors(file)
    return found


def open_file(file: Path, names: Collection[str], rename: Callable[[str], str]) -> dict[str, Stored]:
    """Return the weights in a file of safetensors or GGUF, by the `names` of diffusers.

    `rename` converts the original name of a weight to diffusers'. Raises InputError for other files, and for weights
    that would be read wrongly.
    """
    renamed = {}
    for name, stored in _opened(file).items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        renamed[name if name in names else rename(name)] = stored
    return renamed


def _opened(file: Path) -> dict[str, Stored]:
    return _open_gguf(file) if file.suffix == ".gguf" else _open_safetensors(file)


def _open_safetensors(file: Path) -> dict[str, Stored]:
    tensors = open_safetensors(file, "weights file")
    keys = set(tensors.keys())
    found: dict[str, Stored] = {}
    quantized = set()  # modules whose weights mean nothing without what is beside them
    for key in keys:
        module, _, kind = key.rpartition(".")
        if kind in _NO_WEIGHTS or key in _NO_WEIGHTS:
            continue
        scale = next((f"{module}.{name}" for name in _SCALES if kind == "weight" and f"{module}.{name}" in keys), None)
        read = partial(tensors.get_tensor, key) if scale is None else partial(_scaled, tensors, key, scale)
        stored = tensors.get_slice(key)
        shape, dtype = stored.get_shape(), stored.get_dtype()
        if scale is not None and not _is_known(factors := tensors.get_slice(scale).get_shape(), shape):
            raise InputError(
                f"The weights file {file} has {scale} of shape {factors} for a weight of {shape}, and svdq reads one "
                "scale for all or one a row; give other weights."
            )
        if kind == "weight" and dtype.startswith(("I", "U")) and scale is None:
            raise InputError(
                f"The weights file {file} has {key} of {dtype} without a scale, which svdq cannot read; give weights "
                "in bf16, fp8 or GGUF."
            )
        if kind == "weight" and dtype.startswith(("F8", "I", "U")):
            quantized.add(module)
        found[key] = Stored(num_elements=math.prod(shape), read=read)
    for key in found:
        if key.endswith((".weight", ".bias")):
            continue
        if beside := next((module for module in quantized if key.startswith((f"{module}.", f"{module}_"))), ""):
            raise InputError(
                f"The weights file {file} has {key} beside {beside}.weight, of which svdq does not know how it changes "
                "that; give weights in bf16, fp8 (scale_weight or weight_scale) or GGUF."
            )
    return found


def _is_known(factors: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether `_scaled` can apply scales of a shape: one for all, or one a row."""
    return math.prod(factors) == 1 or (math.prod(factors) == factors[0] == shape[0])


def _scaled(tensors: Any, key: str, scale: str) -> Tensor:
    """Read a weight that is stored in fp8 as a fraction of a scale; float32."""
    factor: Tensor = tensors.get_tensor(scale).to(torch.float32)
    weight: Tensor = tensors.get_tensor(key).to(torch.float32)
    if factor.ndim:  # one for all, or one a row
        factor = factor.reshape(-1, *(1,) * (weight.ndim - 1))
    return weight * factor


def _open_gguf(file: Path) -> dict[str, Stored]:
    tensors = _gguf_tensors(file)
    from gguf.quants import dequantize

    def read(tensor: Any) -> Tensor:
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

    return {tensor.name: Stored(num_elements=int(tensor.n_elements), read=partial(read, tensor)) for tensor in tensors}


def _gguf_tensors(file: Path) -> Sequence[Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(f"The weights file {file} needs the package gguf; {how_to_install('gguf')}.") from error
    try:
        return list(GGUFReader(file).tensors)
    except (OSError, ValueError) as error:
        raise InputError(f"The weights file {file} cannot be read ({error}); fetch it again.") from error


def empty_component(kind: Any, config: Mapping[str, Any]) -> Any:
    """Create a component of diffusers without memory for its weights; its buffers have their values."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return kind.from_config(dict(config))


def load_weights(
    model: Any,
    stored: Mapping[str, Stored],
    loras: Sequence[Lora],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any = None,
) -> None:
    """Load the weights of an `empty_component`, as its `from_pretrained` does; `stored` has all of them."""
    from diffusers.models.model_loading_utils import load_model_dict_into_meta
    from diffusers.quantizers import DiffusersAutoQuantizer

    quantizer, keep = None, list(model._keep_in_fp32_modules or ())
    if quantization is not None:
        quantizer = DiffusersAutoQuantizer.from_config(quantization, pre_quantized=False)
        keep = keep if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
        quantizer.validate_environment()
        dtype = quantizer.update_torch_dtype(dtype)
        quantizer.preprocess_model(model=model, device_map=None, state_dict=dict(stored), keep_in_fp32_modules=keep)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    load_model_dict_into_meta(
        model,
        Weights({name: stored[name] for name in shapes}, shapes, loras),
        dtype=dtype,
        device_map={"": device},
        hf_quantizer=quantizer,
        keep_in_fp32_modules=keep,
    )
    if quantizer is not None:
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    model.eval()


def renaming(kind: Any) -> Callable[[str], str]:
    """Return the conversion of original names of weights to diffusers' for a class of diffusers; most have none."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    convert = SINGLE_FILE_LOADABLE_CLASSES.get(kind.__name__, {}).get("checkpoint_mapping_fn")
    # It renames the keys of a dict and leaves the values alone.
    return (lambda name: str(next(iter(convert({name: name}))))) if convert else str


def num_weights(file: Path) -> int:
    """Return the number of weights in a file, by its header."""
    return sum(stored.num_elements for stored in _opened(file).values())
