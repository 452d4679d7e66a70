"""Weights that are made where they are used: a layer keeps what its file stores, fp8 with scales or GGUF blocks.

W = dequantize(stored) + sum of strength * (alpha / rank) * B @ A, in float32 and rounded once to the dtype computed in.
Weights that are made once, when they are loaded, are made by the same functions on the same device: same bits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from svdq.pipeline.models.compute.options import KEPT_BUFFER
from svdq.pipeline.models.weights.formats import Stored, shapes_of
from svdq.pipeline.models.weights.loras import Lora


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a weight is made of what its file and the LoRAs of a model file store."""

    name: str
    stored: Stored
    loras: Sequence[Lora]
    shape: torch.Size
    dtype: torch.dtype  # of the weight in the model, which LoRAs are added to: diffusers adds them to loaded weights

    @cached_property
    def is_smaller(self) -> bool:
        """Whether the file has fewer bytes of it than the model."""
        return sum(each.nbytes for each in self.stored.read().values()) < self.stored.num_elements * self.dtype.itemsize

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors that it is made of, by the names that `make` knows them by."""
        stored = self.stored.read()
        if self.loras and not self.is_smaller:
            stored = {part: each.to(self.dtype) if each.is_floating_point() else each for part, each in stored.items()}
        added = (lora.read(self.name).items() for lora in self.loras)
        return stored | {f"{n} {kind}": each for n, found in enumerate(added) for kind, each in found}

    def make(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Make the weight of its tensors, on their device; float32 if a LoRA changes it, or it is stored in blocks."""
        weight = self.stored.dequantize(tensors).reshape(self.shape)
        if self.loras:
            weight = (weight if self.is_smaller else weight.to(self.dtype)).to(torch.float32)
        for number, lora in enumerate(self.loras):
            start = f"{number} "
            added = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
            weight = lora.add(self.name, weight, added)
        return weight


class Weights(dict[str, Tensor]):
    """The weights of a component; a dict for diffusers' loaders, but each is made when it is asked for."""

    def __init__(self, recipes: Mapping[str, Recipe], device: torch.device) -> None:
        super().__init__(dict.fromkeys(recipes))  # type: ignore[arg-type]
        self._recipes = recipes
        #: The meta device computes nothing.
        self._device = torch.device("cpu") if device.type == "meta" else device

    def __getitem__(self, name: str) -> Tensor:
        """Make a weight."""
        recipe = self._recipes[name]
        return recipe.make({part: tensor.to(self._device) for part, tensor in recipe.tensors().items()})

    def items(self) -> Any:
        """Make the weights one after the other."""
        return ((name, self[name]) for name in self)


class MadeWeight:
    """A part of the classes of layers whose weight is made each time that they use it."""

    name: str  # of the weight in its component
    made_dtype: torch.dtype
    #: What makes it of `kept`; None: the layer has the weight itself, and only LoRAs of jobs change it.
    recipe: Recipe | None = None
    #: The buffer, dtype and shape of each tensor that the weight is made of: as bytes, no `to` changes their type.
    kept: Mapping[str, tuple[str, torch.dtype, torch.Size]]
    #: The LoRAs of the present video, each with its tensors on the layer's device.
    job_loras: Sequence[tuple[Lora, Mapping[str, Tensor]]] = ()

    @property
    def weight(self) -> Tensor:
        """The weight, made now."""
        weight: Tensor
        if self.recipe is None:
            weight = self._parameters["weight"]  # type: ignore[attr-defined]
            if not self.job_loras:
                return weight
        else:
            weight = self.recipe.make(
                {
                    name: getattr(self, buffer).view(dtype).reshape(shape)
                    for name, (buffer, dtype, shape) in self.kept.items()
                }
            )
        for lora, tensors in self.job_loras:
            weight = lora.add(self.name, weight.to(torch.float32), tensors)
        return weight.to(self.made_dtype)


@cache
def _made(kind: Any) -> Any:
    return type(f"Made{kind.__name__}", (MadeWeight, kind), {})


def make_at_use(layer: nn.Module, name: str) -> MadeWeight:
    """Let a layer make its weight when it uses it, in the dtype that it has now."""
    if isinstance(layer, MadeWeight):
        return layer
    dtype = layer._parameters["weight"].dtype  # type: ignore[union-attr]
    layer.__class__ = _made(type(layer))  # type: ignore[arg-type]
    assert isinstance(layer, MadeWeight)
    layer.name, layer.made_dtype = name, dtype
    return layer


def layers_of_blocks(model: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """Return the layers of a component's repeated `blocks` by the names of their weights: nearly all that it weighs."""
    return {
        f"{place}.{name}.weight": layer
        for place, block in model.named_modules()
        if type(block).__name__ in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear | _ConvNd)
    }


def keep_stored(
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    blocks: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
) -> set[str]:
    """Let layers of a component's blocks keep what the file stores; return the names of their weights.

    Those are weights that the file stores in fewer bytes, and weights that LoRAs of a model file change, since LoRAs of
    jobs may change them, too.
    `model` has no memory for its weights; those that stay in float32 are made once.
    """
    stored = set()
    for name, layer in layers_of_blocks(model, blocks).items():
        recipe = recipes[name]
        if recipe.dtype != dtype or not (recipe.is_smaller or recipe.loras):
            continue
        tensors, kept = recipe.tensors(), {}
        made = make_at_use(layer, name)
        del layer._parameters["weight"]
        for number, (part, tensor) in enumerate(tensors.items()):
            kept[part] = (f"{KEPT_BUFFER}{number}", tensor.dtype, tensor.shape)
            bits = tensor.contiguous().reshape(-1).view(torch.uint8).to(device)
            layer.register_buffer(f"{KEPT_BUFFER}{number}", bits, persistent=False)
        made.recipe, made.made_dtype, made.kept = recipe, dtype, kept
        stored.add(name)
    return stored


def load_weights(
    model: Any,
    stored: Mapping[str, Stored],
    loras: Sequence[Lora],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Any = None,
    kept_in: Collection[str] | None = None,
) -> None:
    """Load the weights of an `empty_component`, as its `from_pretrained` does; `stored` has all of them.

    Layers in blocks of the classes `kept_in` keep what the file stores where that is smaller, and LoRAs of jobs may
    change them; not with a `quantization` of diffusers.
    """
    import transformers
    from diffusers.models.model_loading_utils import load_model_dict_into_meta
    from diffusers.quantizers import DiffusersAutoQuantizer

    # transformers keeps modules in float32 for float16 only.
    is_text = isinstance(model, transformers.PreTrainedModel)
    quantizer, keep = None, [] if is_text and dtype != torch.float16 else list(model._keep_in_fp32_modules or ())
    if quantization is not None:
        quantizer = DiffusersAutoQuantizer.from_config(quantization, pre_quantized=False)
        keep = keep if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
        quantizer.validate_environment()
        dtype = quantizer.update_torch_dtype(dtype)
        quantizer.preprocess_model(model=model, device_map=None, state_dict=dict(stored), keep_in_fp32_modules=keep)
    recipes = {
        name: Recipe(
            name=name,
            stored=stored[name],
            loras=[each for each in loras if name in each.parts],
            shape=shape,
            dtype=torch.float32 if {*keep} & {*name.split(".")} else dtype,
        )
        for name, shape in shapes_of(model).items()
    }
    if kept_in is not None:
        for name in keep_stored(model, recipes, kept_in, dtype, device):
            del recipes[name]
    load_model_dict_into_meta(
        model,
        Weights(recipes, device),
        dtype=dtype,
        device_map={"": device},
        hf_quantizer=quantizer,
        keep_in_fp32_modules=keep,
    )
    if quantizer is not None:
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    if is_text:
        model.tie_weights()
    if kept_in is not None:
        model.recipes = {name: recipe for name, recipe in recipes.items() if recipe.loras or recipe.is_smaller}
    model.eval()
