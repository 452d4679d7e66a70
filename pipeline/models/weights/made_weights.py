"""Layers that keep what their file stores, and make their weight where they use it, or multiply in its format.

W = dequantize(stored) + sum of strength * (alpha / rank) * B @ A, in float32 and rounded once to the dtype computed in.
Weights that are made once, when they are loaded, are made by the same functions on the same device: same bits.

A layer that multiplies in its format adds LoRAs beside its product: W x + sum of strength * (alpha / rank) * B(A x).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from svdq.pipeline.models.compute.options import KEPT_BUFFER
from svdq.pipeline.models.weights.comfy_quant import Mark
from svdq.pipeline.models.weights.formats import Stored, shapes_of
from svdq.pipeline.models.weights.kitchen import Multiply, dequantize_of, multiply_of, quantize
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

    def mark_among(self, formats: Collection[str]) -> Mark | None:
        """Return the format that it is stored in if a layer can multiply in it, and its title is among `formats`."""
        mark = self.stored.mark
        if mark is None or mark.is_made or mark.format.title not in formats:
            return None
        return None if any(side % mark.format.sides for side in self.shape) else mark

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
        for lora, added in self.loras_in(tensors):
            weight = lora.add(self.name, weight, added)
        return weight

    def loras_in(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Lora, dict[str, Tensor]]]:
        """Yield the LoRAs with their tensors, of all that it is made of."""
        for number, lora in enumerate(self.loras):
            start = f"{number} "
            yield lora, {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}


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
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the weight is made of, by the names that the recipe knows them by."""
        return {
            name: getattr(self, buffer).view(dtype).reshape(shape) for name, (buffer, dtype, shape) in self.kept.items()
        }

    @property
    def weight(self) -> Tensor:
        """The weight, made now."""
        weight: Tensor
        if self.recipe is None:
            weight = self._parameters["weight"]  # type: ignore[attr-defined]
            if not self.job_loras:
                return weight
        else:
            weight = self.recipe.make(self.tensors)
        for lora, tensors in self.job_loras:
            weight = lora.add(self.name, weight.to(torch.float32), tensors)
        return weight.to(self.made_dtype)


class NativeWeight(MadeWeight):
    """A part of the classes of linear layers that multiply in the format of their weight."""

    bias: Tensor | None
    multiply: Multiply

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Multiply (..., K) by the weight (N, K), and add LoRAs and the bias: (..., N)."""
        assert self.recipe is not None
        rows, tensors = hidden_states.reshape(-1, hidden_states.shape[-1]), self.tensors
        product = self.multiply(rows, tensors, self.bias)
        for lora, added in (*self.recipe.loras_in(tensors), *self.job_loras):
            lora.add_beside(self.name, product, rows, added)
        return product.reshape(*hidden_states.shape[:-1], -1)


@cache
def _made(part: Any, kind: Any) -> Any:
    return type(f"{part.__name__.removesuffix('Weight')}{kind.__name__}", (part, kind), {})


def make_at_use(layer: nn.Module, name: str, part: type[MadeWeight] = MadeWeight) -> MadeWeight:
    """Let a layer make its weight when it uses it, in the dtype that it has now; `part` is of its new class."""
    if isinstance(layer, MadeWeight):
        return layer
    dtype = layer._parameters["weight"].dtype  # type: ignore[union-attr]
    layer.__class__ = _made(part, type(layer))  # type: ignore[arg-type]
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


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Which layers of a component's blocks keep what its file stores."""

    blocks: Collection[str]  # the classes of the blocks
    native: Collection[str] = ()  # titles of the formats that linear layers multiply in
    quantizes: bool = False  # whether the other linear layers are quantized to int8, and multiply in it
    device: torch.device  # where weights are made to be quantized


def keep_stored(
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    keeping: Keeping,
    dtype: torch.dtype,
    device: torch.device,
) -> set[str]:
    """Let layers of a component's blocks keep what the file stores; return the names of their weights.

    Those are weights that the file stores in fewer bytes, and weights that LoRAs of a model file change, since LoRAs of
    jobs may change them, too; or all of linear layers where they are quantized.
    `model` has no memory for its weights; those that stay in float32 are made once.
    """
    kept = set()
    for name, layer in layers_of_blocks(model, keeping.blocks).items():
        recipe, is_linear = recipes[name], isinstance(layer, nn.Linear)
        if recipe.dtype != dtype:
            continue
        mark = recipe.mark_among(keeping.native) if is_linear else None
        if mark is None and is_linear and keeping.quantizes:
            recipe, mark, tensors = _quantized(recipe, keeping.device)
        elif recipe.is_smaller or recipe.loras:
            tensors = recipe.tensors()
        else:
            continue
        _keep(layer, recipe, mark, tensors, dtype, device)
        kept.add(name)
    return kept


def _quantized(recipe: Recipe, device: torch.device) -> tuple[Recipe, Mark, dict[str, Tensor]]:
    """Make a weight with the LoRAs of a model file, and quantize it to int8; return how to make it of what remains."""
    weight = recipe.make({part: each.to(device) for part, each in recipe.tensors().items()}).to(recipe.dtype)
    mark, tensors = quantize(weight)
    stored = Stored(num_elements=weight.numel(), read=dict, dequantize=dequantize_of(mark))  # no file has them
    return replace(recipe, stored=stored, loras=()), mark, tensors


def _keep(
    layer: nn.Module,
    recipe: Recipe,
    mark: Mark | None,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Let a layer keep the tensors that its weight is made of, on a device, and multiply in the format of a mark."""
    made, kept = make_at_use(layer, recipe.name, MadeWeight if mark is None else NativeWeight), {}
    del layer._parameters["weight"]
    for number, (part, tensor) in enumerate(tensors.items()):
        kept[part] = (f"{KEPT_BUFFER}{number}", tensor.dtype, tensor.shape)
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).to(device)
        layer.register_buffer(f"{KEPT_BUFFER}{number}", bits, persistent=False)
    made.recipe, made.made_dtype, made.kept = recipe, dtype, kept
    if mark is not None:
        assert isinstance(made, NativeWeight)
        made.multiply = multiply_of(mark)


def load_weights(
    model: Any,
    stored: Mapping[str, Stored],
    loras: Sequence[Lora],
    *,
    dtype: torch.dtype,
    device: torch.device,
    keeping: Keeping | None = None,
) -> None:
    """Load the weights of an `empty_component`, as its `from_pretrained` does; `stored` has all of them.

    With `keeping`, LoRAs of jobs may change the layers that keep what the file stores.
    """
    import transformers
    from diffusers.models.model_loading_utils import load_model_dict_into_meta

    # transformers keeps modules in float32 for float16 only.
    is_text = isinstance(model, transformers.PreTrainedModel)
    keep = [] if is_text and dtype != torch.float16 else list(model._keep_in_fp32_modules or ())
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
    if keeping is not None:
        for name in keep_stored(model, recipes, keeping, dtype, device):
            del recipes[name]
    load_model_dict_into_meta(
        model,
        Weights(recipes, device),
        dtype=dtype,
        device_map={"": device},
        keep_in_fp32_modules=keep,
    )
    if is_text:
        model.tie_weights()
    model.to(device)  # buffers that no file has, such as those of rotary embeddings
    if keeping is not None:
        model.recipes = {name: recipe for name, recipe in recipes.items() if recipe.loras or recipe.is_smaller}
    model.eval()
