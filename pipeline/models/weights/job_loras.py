"""The LoRAs that jobs choose, on one rank: each is opened once, and changes a component for the steps of its videos.

A layer of a block makes its weight at use, W + sum of strength * (alpha / rank) * B @ A in float32 and rounded once, or
adds B(A x) beside its product in the format of its file: as if the LoRAs were in the model file after its own. The few
other weights are replaced meanwhile. Bits are the same.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import lora_folder
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.lora_folder import LoraFolder
from svdq.pipeline.models.resolved_model import LoraFile
from svdq.pipeline.models.weights.components import ComponentLoader
from svdq.pipeline.models.weights.loras import Lora
from svdq.pipeline.models.weights.made_weights import MadeWeight, layers_of_blocks, make_at_use
from svdq.pipeline.video_parameters import LoraChoice

_Tensors = Mapping[str, Mapping[str, Tensor]]  # of a LoRA, on the device, by weight and kind of part


class JobLoras:
    """The LoRAs of jobs for the denoising components of a model."""

    def __init__(self, found: ComponentLoader, family: Family, folder: LoraFolder, device: torch.device) -> None:
        """Open none yet."""
        self._found, self._family, self._folder, self._device = found, family, folder, device
        self._components = found.denoisers()
        self._opening = threading.Lock()
        #: By digest and component; the tensors used last are at the end.
        self._opened: dict[tuple[str, str], Lora | InputError] = {}
        self._tensors: dict[tuple[str, str], _Tensors] = {}
        #: The LoRAs that each component has at present, if any, and the weights that made ones are in place of.
        self.on: dict[str, tuple[LoraChoice, ...]] = {}
        self._replaced: dict[str, dict[str, nn.Parameter]] = {}

    def check(self, loras: Sequence[LoraChoice]) -> None:
        """Raise an InputError unless each can be applied to the model."""
        for choice in loras:
            self._changing(choice)

    def _changing(self, choice: LoraChoice) -> dict[str, Lora]:
        """Return a LoRA by the denoising components that it changes; raises InputError if there are none."""
        components = self._components
        if choice.expert is not None:
            component = self._family.experts.get(choice.expert, "")
            if component not in components or len(components) == 1:
                raise InputError(
                    f"The LoRA {choice.name} is for the {choice.expert}-noise expert of two, which the model "
                    f"{self._found.name} has not; give it without {choice.expert}=."
                )
            components = [component]
        opened = {component: self._open(choice, component) for component in components}
        found = {component: lora for component, lora in opened.items() if isinstance(lora, Lora)}
        if not found:
            raise InputError(str(next(iter(opened.values()))))
        return found

    def _open(self, choice: LoraChoice, component: str) -> Lora | InputError:
        key = (choice.digest, component)
        with self._opening:
            if key not in self._opened:
                file = self._folder.find(choice.digest)
                if file is None:
                    raise InputError(
                        f"The LoRA {choice.name} is not in the folder SVDQ_LORAS of this worker, or its file has "
                        "changed; put it there, or submit again."
                    )
                try:
                    self._opened[key] = self._found.open_lora(LoraFile(file=file, component=component))
                except InputError as error:
                    self._opened[key] = error
            return self._opened[key]

    def _on_device(self, key: tuple[str, str], lora: Lora) -> _Tensors:
        tensors = self._tensors.pop(key, None)
        if tensors is None:
            tensors = {
                name: {kind: each.to(self._device) for kind, each in lora.read(name).items()} for name in lora.parts
            }
        self._tensors[key] = tensors
        return tensors

    def _drop_old(self, num_used: int) -> None:
        """Forget the tensors that were used the longest time ago, beyond what is kept; not the last `num_used`."""
        sizes = {
            key: sum(part.nbytes for parts in tensors.values() for part in parts.values())
            for key, tensors in self._tensors.items()
        }
        for key in list(sizes)[: len(sizes) - num_used]:
            if sum(sizes.values()) <= lora_folder.KEPT_BYTES:
                break
            del self._tensors[key], sizes[key]

    def applied(self, loras: Sequence[LoraChoice], component: str, module: Any) -> Any:
        """Return a denoising component with the LoRAs of a video, and no other ones of jobs."""
        found = [(choice, self._changing(choice)) for choice in loras]
        mine = tuple(choice for choice, by_component in found if component in by_component)
        if self.on.get(component, ()) == mine:
            return module
        self.put_back(component, module)
        if not mine:
            return module
        added: dict[str, list[tuple[Lora, Mapping[str, Tensor]]]] = {}
        for choice, by_component in found:
            if (lora := by_component.get(component)) is None:
                continue
            strong = replace(lora, file=lora.file.model_copy(update={"strength": choice.strength}))
            for name, tensors in self._on_device((choice.digest, component), lora).items():
                added.setdefault(name, []).append((strong, tensors))
        self._drop_old(len(mine))
        layers = layers_of_blocks(module, self._found.layout.blocks)
        self.on[component] = mine
        try:
            for name, each in added.items():
                if name in layers:
                    make_at_use(layers[name], name).job_loras = each
                else:
                    self._replace(component, module, name, each)
        except BaseException:  # such as an out-of-memory error: the next video may have none
            self.put_back(component, module)
            raise
        return module

    def _replace(
        self, component: str, module: Any, name: str, added: Sequence[tuple[Lora, Mapping[str, Tensor]]]
    ) -> None:
        """Make a weight with LoRAs, and keep the one that it replaces."""
        place, _, leaf = name.rpartition(".")
        layer = module.get_submodule(place)
        before = weight = layer._parameters[leaf]
        if recipe := getattr(module, "recipes", {}).get(name):
            weight = recipe.make({part: each.to(self._device) for part, each in recipe.tensors().items()})
        for lora, tensors in added:
            weight = lora.add(name, weight.to(self._device, torch.float32), tensors)
        self._replaced.setdefault(component, {})[name] = before
        layer._parameters[leaf] = nn.Parameter(weight.to(before.dtype), requires_grad=False)

    def put_back(self, component: str, module: Any) -> None:
        """Take the LoRAs of jobs off a denoising component."""
        if self.on.pop(component, None) is None:
            return
        for layer in module.modules():
            if isinstance(layer, MadeWeight):
                layer.job_loras = ()
        for name, before in self._replaced.pop(component, {}).items():
            place, _, leaf = name.rpartition(".")
            module.get_submodule(place)._parameters[leaf] = before
