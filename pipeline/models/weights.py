"""The weights of one component by diffusers' names, read and converted one at a time.

They come from a folder of diffusers, or from one file as ComfyUI has it: safetensors, also `fp8_scaled`, or GGUF. LoRAs
are added before a weight is rounded to the dtype computed in, so the memory never holds a component twice.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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

Read = Callable[[], Tensor]  # reads one weight, as stored


class Weights(dict[str, Tensor]):
    """The weights of a component; a dict for diffusers' loaders, but each is read when it is asked for."""

    def __init__(self, read: Mapping[str, Read], shapes: Mapping[str, torch.Size], loras: Sequence[Lora]) -> None:
        super().__init__(dict.fromkeys(read))  # type: ignore[arg-type]
        self._read = read
        self._shapes = shapes
        self._loras = loras

    def __getitem__(self, name: str) -> Tensor:
        """Read a weight; float32 if a LoRA changes it."""
        weight = self._read[name]()
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


def read_folder(files: Sequence[Path]) -> dict[str, Read]:
    """Return the weights in the safetensors files of a diffusers folder."""
    found: dict[str, Read] = {}
    for file in files:
        tensors = open_safetensors(file, "weights file")
        found |= {name: _later(tensors.get_tensor, name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    return found


def read_file(file: Path, names: Collection[str], rename: Callable[[str], str]) -> dict[str, Read]:
    """Return the weights in one file.

    Args:
        file: safetensors or GGUF.
        names: the component's weights, as diffusers names them.
        rename: converts the original name of a weight to diffusers'.

    Raises:
        InputError: it is neither, or cannot be read.
    """
    found = _read_gguf(file) if file.suffix == ".gguf" else _read_safetensors(file)
    renamed = {}
    for name, read in found.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        renamed[name if name in names else rename(name)] = read
    return renamed


def _read_safetensors(file: Path) -> dict[str, Read]:
    tensors = open_safetensors(file, "weights file")
    keys = set(tensors.keys())
    found: dict[str, Read] = {}
    for key in keys:
        module, _, kind = key.rpartition(".")
        if kind in _NO_WEIGHTS or key in _NO_WEIGHTS:
            continue
        scale = next((f"{module}.{name}" for name in _SCALES if kind == "weight" and f"{module}.{name}" in keys), None)
        found[key] = _later(tensors.get_tensor, key) if scale is None else _later(_scaled, tensors, key, scale)
    return found


def _scaled(tensors: Any, key: str, scale: str) -> Tensor:
    """Read a weight that is stored in fp8 as a fraction of a scale; float32."""
    factor: Tensor = tensors.get_tensor(scale).to(torch.float32)
    weight: Tensor = tensors.get_tensor(key).to(torch.float32)
    if factor.ndim:  # one for all, or one a row
        factor = factor.reshape(-1, *(1,) * (weight.ndim - 1))
    return weight * factor


def _read_gguf(file: Path) -> dict[str, Read]:
    tensors = _gguf_tensors(file)
    from gguf.quants import dequantize

    def read(tensor: Any) -> Tensor:
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

    return {tensor.name: _later(read, tensor) for tensor in tensors}


def _gguf_tensors(file: Path) -> Sequence[Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(f"The weights file {file} needs the package gguf; {how_to_install('gguf')}.") from error
    try:
        return list(GGUFReader(file).tensors)
    except (OSError, ValueError) as error:
        raise InputError(f"The weights file {file} cannot be read ({error}); fetch it again.") from error


def _later(read: Callable[..., Tensor], *arguments: Any) -> Read:
    return lambda: read(*arguments)


def empty_component(kind: Any, config: Mapping[str, Any]) -> Any:
    """Create a component of diffusers without memory for its weights; its buffers have their values."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return kind.from_config(dict(config))


def load_weights(
    model: Any,
    read: Mapping[str, Read],
    loras: Sequence[Lora],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any = None,
) -> None:
    """Load the weights of an `empty_component`, as its `from_pretrained` does; `read` has all of them."""
    from diffusers.models.model_loading_utils import load_model_dict_into_meta
    from diffusers.quantizers import DiffusersAutoQuantizer

    quantizer, keep = None, list(model._keep_in_fp32_modules or ())
    if quantization is not None:
        quantizer = DiffusersAutoQuantizer.from_config(quantization, pre_quantized=False)
        keep = keep if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
        quantizer.validate_environment()
        dtype = quantizer.update_torch_dtype(dtype)
        quantizer.preprocess_model(model=model, device_map=None, state_dict=dict(read), keep_in_fp32_modules=keep)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    load_model_dict_into_meta(
        model,
        Weights({name: read[name] for name in shapes}, shapes, loras),
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
    if file.suffix == ".gguf":
        return sum(int(tensor.n_elements) for tensor in _gguf_tensors(file))
    tensors = open_safetensors(file, "weights file")
    return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
