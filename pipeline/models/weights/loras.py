"""LoRAs: reads the files in which they are published, and adds them to the weights of a component.

W + strength * (alpha / rank) * B @ A (Hu et al. 2021, arXiv:2106.09685), computed in float32 and rounded once. Keys are
matched to weights by their names alone, so that a rank reads only the tensors of its components: diffusers' converters
would load all of them, refuse some files of trainers, and cover neither UNets of videos nor all flattened keys.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.resolved_model import LoraFile
from svdq.pipeline.models.weights.model_folder import unreadable
from svdq.pipeline.models.weights.safetensors_file import DTYPES_IN_FILES, SafetensorsFile

#: The parts of a LoRA by the end of their keys, and the parameter of a module that each changes.
_PARTS = {
    "lora_A.weight": ("down", "weight"),
    "lora_down.weight": ("down", "weight"),
    "lora_A.default.weight": ("down", "weight"),
    "lora_B.weight": ("up", "weight"),
    "lora_up.weight": ("up", "weight"),
    "lora_B.default.weight": ("up", "weight"),
    "alpha": ("alpha", "weight"),
    "diff": ("diff", "weight"),
    "diff_m": ("diff", "modulation"),  # of a block, in LightX2V's files
    "lora_B.bias": ("diff", "bias"),
    "diff_b": ("diff", "bias"),
}
_COMPONENTS = ("transformer.", "transformer_2.", "unet.")  # what keys begin with in files for several components
#: What programs put before the names of weights: peft, ComfyUI, DiffSynth-Studio, diffusers, musubi-tuner, VideoX-Fun.
_PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "pipe.dit.", "transformer.", "unet.",
    "lora_unet_model_", "lora_unet__", "lora_unet_",
)  # fmt: skip
#: Weights that ComfyUI leaves alone where a LoRA has another shape, as of text to video for image to video.
_SKIPPED = ("patch_embedding.weight", "patch_embedding.bias")


@dataclass(kw_only=True)
class Lora:
    """An open LoRA whose keys are matched to the weights of a component; tensors are read when they are added."""

    file: LoraFile
    tensors: SafetensorsFile
    parts: dict[str, dict[str, str]] = field(default_factory=dict)  # keys of parts by weight and kind of part
    #: By weight, alpha / rank of peft's configuration, and of the two factors, which may have an alpha beside them.
    scales: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    #: Keys that match no weight, and those that are dropped as in diffusers: whole differences of norms and the like.
    unmatched: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # of another shape
    num_keys: int = 0

    def read(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that change a weight, by kind; mapped from the file."""
        return {kind: tensor_of(self.tensors, key) for kind, key in self.parts[name].items() if kind != "alpha"}

    def add(self, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a weight, float32, with what the LoRA adds to it by such `tensors`, which are on its device."""
        added = {kind: tensor.to(torch.float32) for kind, tensor in tensors.items()}
        if "diff" in added:
            weight = weight + (self.file.strength * self.scales[name]) * added["diff"].reshape(weight.shape)
        if "down" in added:
            # Kernels of convolutions are flattened: B has a kernel of 1.
            product = (added["up"].flatten(1) @ added["down"].flatten(1)).reshape(weight.shape)
            weight = weight + (self.file.strength * self.factors[name]) * product
        return weight

    def add_beside(self, name: str, product: Tensor, rows: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Add to a product (M, N), in place, what the LoRA adds to it: B(A x) of the rows (M, K), in their dtype."""
        added = {kind: tensor.to(rows.dtype) for kind, tensor in tensors.items()}
        if "diff" in added:
            weight = added["diff"].reshape(product.shape[1], rows.shape[1])
            product.addmm_(rows, weight.t(), alpha=self.file.strength * self.scales[name])
        if "down" in added:
            inner = rows @ added["down"].flatten(1).t()
            product.addmm_(inner, added["up"].flatten(1).t(), alpha=self.file.strength * self.factors[name])


def open_lora(file: LoraFile, shapes: Mapping[str, Sequence[int]], rename: Callable[[str], str]) -> Lora:
    """Match the keys of a LoRA to the weights of a component, whose `shapes` have diffusers' names.

    `rename` converts the original name of a weight. Raises InputError for other files, or if none of them match.
    """
    component, tensors = file.component, open_safetensors(file.file, "LoRA")
    lora = Lora(file=file, tensors=tensors)
    keys = list(tensors.entries)
    settings = _settings(file, tensors.metadata.get("lora_adapter_metadata", "{}"))
    if is_of_several := any(key.startswith(f"{component}.") for key in keys):
        keys = [key for key in keys if key.startswith(f"{component}.") or not key.startswith(_COMPONENTS)]
    lora.num_keys = len(keys)
    modules = {name.rpartition(".")[0] for name in shapes}
    flattened = {module.replace(".", "_"): module for module in modules}
    for key in keys:
        name, kind = _weight_of(key.removeprefix(f"{component}.") if is_of_several else key, shapes, flattened, rename)
        if not kind:
            raise InputError(
                f"The LoRA {file.file.name} has {key}: only plain LoRAs are supported, no DoRA, LoHa or LoKr, and no "
                "whole weights; give another file."
            )
        if name is None:
            lora.unmatched.append(key)
        else:
            lora.parts.setdefault(name, {})[kind] = key
    for name in [name for name, kinds in lora.parts.items() if kinds.keys() == {"alpha"}]:
        lora.unmatched += lora.parts.pop(name).values()
    for name in [name for name in lora.parts if _is_dropped(name, lora.parts)]:
        lora.dropped += lora.parts.pop(name).values()
    if not lora.parts:
        example = keys[0] if keys else "no keys"
        raise InputError(
            f"None of the {len(keys)} keys of the LoRA {file.file.name} (such as {example}) match a weight of the "
            f"{component}; give a LoRA of this model, or name the component that it is for."
        )
    others = [name for name, kinds in lora.parts.items() if not _fits(tensors, name, kinds, shapes[name], file)]
    if {*others} <= {*_SKIPPED} and len(others) < len(lora.parts):
        lora.skipped += [key for name in others for key in lora.parts.pop(name).values()]
    elif unfit := [key for name in others for key in lora.parts[name].values()]:
        num_matching = len(keys) - len(unfit) - len(lora.unmatched) - len(lora.dropped)
        raise InputError(
            f"The LoRA {file.file.name} is of another model: {num_matching} of its {len(keys)} keys match a weight of "
            f"the {component}, and {unfit[0]} has another shape; give a LoRA of this model."
        )
    for name, kinds in lora.parts.items():
        lora.scales[name] = _scale(file, name.removesuffix(".weight").removesuffix(".bias"), settings)
        lora.factors[name] = lora.scales[name]
        if "alpha" in kinds and "down" in kinds:
            rank, alpha = tensors.entries[kinds["down"]].shape[0], tensor_of(tensors, kinds["alpha"])
            if alpha.numel() != 1 or not bool(alpha.isfinite().all()):
                raise InputError(
                    f"The LoRA {file.file.name} has {kinds['alpha']} that is not one number; fetch it again."
                )
            lora.factors[name] = float(alpha) / rank
    return lora


def _fits(tensors: SafetensorsFile, name: str, kinds: Mapping[str, str], shape: Sequence[int], file: LoraFile) -> bool:
    """Return whether the two factors of a weight make one of a shape; raises InputError for only one of them."""
    if ("down" in kinds) != ("up" in kinds):
        raise InputError(f"The LoRA {file.file.name} has only one of the two factors for {name}; fetch it again.")
    if "diff" in kinds and math.prod(tensors.entries[kinds["diff"]].shape) != math.prod(shape):
        return False
    if "down" not in kinds:
        return True
    down, up = (tensors.entries[kinds[kind]].shape for kind in ("down", "up"))
    if 0 in (*down, *up) or min(len(down), len(up)) < 2:
        raise InputError(f"The LoRA {file.file.name} has {kinds['down']} of shape {list(down)}; fetch it again.")
    return (up[0], math.prod(down[1:])) == (shape[0], math.prod(shape[1:]))


def _is_dropped(name: str, parts: Mapping[str, Collection[str]]) -> bool:
    """Return whether diffusers drops it: of a norm, a whole difference but of the head, some biases without a LoRA."""
    if name.endswith(".bias"):
        is_alone = "down" not in parts.get(f"{name.removesuffix('bias')}weight", ())
        return "norm" in name or (is_alone and name.endswith(("time_proj.bias", "patch_embedding.bias")))
    return "norm" in name or ("diff" in parts[name] and name.endswith(".weight") and name != "proj_out.weight")


def _weight_of(
    key: str, names: Collection[str], flattened: Mapping[str, str], rename: Callable[[str], str]
) -> tuple[str | None, str]:
    """Return the weight that a key changes, None if there is none, and the kind of the part, "" if that is unknown."""
    end = next((end for end in _PARTS if key.endswith(f".{end}")), None)
    if end is None:
        return None, ""
    kind, parameter = _PARTS[end]
    module = key.removesuffix(f".{end}")
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    originals = [f"{module}.{parameter}", *([module] if kind == "diff" else [])]
    candidates = [*originals, *map(rename, originals), f"{flattened.get(module)}.{parameter}"]
    return next((name for name in candidates if name in names), None), kind


def _settings(file: LoraFile, written: str) -> dict[str, Any]:
    """Return the configuration that peft writes, of the component alone; raises InputError if it is none."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"The LoRA {file.file.name} has a lora_adapter_metadata that is no JSON object; fetch it again."
        )
    # In files of several components each setting has the component before it.
    return {name.removeprefix(f"{file.component}.").removeprefix("transformer."): each for name, each in found.items()}


def _scale(file: LoraFile, module: str, settings: Mapping[str, Any]) -> float:
    """Return alpha / rank of a module by peft's configuration; 1 without one. Raises InputError for no numbers."""
    if "r" not in settings:
        return 1.0
    alpha, rank = settings.get("lora_alpha", settings["r"]), settings["r"]
    try:
        for pattern, value in (settings.get("alpha_pattern") or {}).items():
            alpha = value if module == pattern or module.endswith(f".{pattern}") else alpha
        for pattern, value in (settings.get("rank_pattern") or {}).items():
            rank = value if module == pattern or module.endswith(f".{pattern}") else rank
        return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))
    except (AttributeError, TypeError, ArithmeticError) as error:
        raise InputError(
            f"The LoRA {file.file.name} has r {str(rank)[:20]} and lora_alpha {str(alpha)[:20]} for {module} in its "
            "lora_adapter_metadata, which is no scale; fetch it again."
        ) from error


def open_safetensors(path: Path, what: str) -> SafetensorsFile:
    """Open a file; raises InputError for others; `what` is for the message."""
    if path.suffix != ".safetensors":
        raise InputError(f"The {what} {path} is no safetensors file; svdq reads no pickles (.pt, .ckpt, .bin).")
    try:
        return SafetensorsFile.open(path)
    except (OSError, ValueError) as error:
        raise unreadable(what, path, error) from error


def tensor_of(file: SafetensorsFile, name: str) -> Tensor:
    """Return a tensor, mapped from its file; what is written to it stays in memory."""
    entry = file.entries[name]
    dtype: torch.dtype = getattr(torch, DTYPES_IN_FILES[entry.dtype][1])
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.start % dtype.itemsize:  # a writer that does not align tensors
        return torch.frombuffer(bytearray(file.bytes_of(name)), dtype=dtype).reshape(entry.shape)
    count = math.prod(entry.shape)
    return torch.frombuffer(file.mapped, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)


def warnings_of(lora: Lora) -> Iterator[str]:
    """Yield sentences about keys of a LoRA that change nothing."""
    named = f"The LoRA {lora.file.file.name}"
    num_used = lora.num_keys - len(lora.unmatched) - len(lora.dropped) - len(lora.skipped)
    if lora.unmatched:
        yield (
            f"{named}: {num_used} of {lora.num_keys} keys match the {lora.file.component}; {len(lora.unmatched)} do "
            f"not, such as {lora.unmatched[0]}."
        )
    if lora.skipped:
        yield f"{named}: {lora.skipped[0]} has another shape than the {lora.file.component}'s and is left out."
    if lora.dropped:
        yield f"{named}: {len(lora.dropped)} differences are dropped, as in diffusers, such as {lora.dropped[0]}."
