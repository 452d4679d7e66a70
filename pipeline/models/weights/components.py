"""Loads components from a diffusers folder, from safetensors alone and offline, with errors that name the weight."""

import importlib
import importlib.util
import logging
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.compute.failures import in_a_sentence
from svdq.pipeline.models.compute.memory import Phase
from svdq.pipeline.models.compute.options import ComputeOptions, apply, stream_layers
from svdq.pipeline.models.family import Family, FileNames, FolderLayout
from svdq.pipeline.models.resolved_model import LoraFile, ResolvedModel
from svdq.pipeline.models.video_model import ModelInfo, Role
from svdq.pipeline.models.weights.formats import (
    Stored,
    empty_component,
    open_file,
    open_folder,
    renaming,
    shapes_of,
    without,
)
from svdq.pipeline.models.weights.loras import Lora, open_lora, warnings_of
from svdq.pipeline.models.weights.made_weights import Keeping, load_weights
from svdq.pipeline.models.weights.model_folder import (
    WEIGHTS,
    class_in,
    is_half,
    is_rounded,
    is_untrained,
    loaded_files,
    metadata_of,
    read_index,
    read_json,
    weights_in,
)
from svdq.pipeline.models.weights.tokenizer_file import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ComponentLoader:
    """The components of a resolved model's folder that a role needs."""

    model: ResolvedModel
    layout: FolderLayout
    role: Role
    dtype: torch.dtype  # of the weights, where a component or a layer is not kept in float32
    _shapes: dict[str, dict[str, torch.Size]] = field(default_factory=dict, init=False)  # by component, for LoRAs

    @property
    def path(self) -> Path:
        """The model's folder."""
        assert self.model.folder is not None
        return self.model.folder

    @property
    def name(self) -> str:
        """The name of the model, for messages."""
        return self.model.name

    def info(self, family: Family, options: ComputeOptions, *, weight_bytes: int, streamed_bytes: int = 0) -> ModelInfo:
        """Describe the model for sidecars, checkpoints and estimates; the bytes are as in `ModelInfo`."""
        model, facts = self.model, self.model.facts
        notices = ["tiny (untrained: shows noise)"] if is_untrained(self.path) else []
        notices += [f"approximate ({way})" for way in options.ways]
        return ModelInfo(
            name=model.name,
            notice=", ".join(notices),
            family=family,
            facts=facts,
            made_of=model.described(),
            identity=model.name if model.base is None else "a model file",
            prior=family.prior(facts),
            sound_rate=facts.get("sound_rate", 0),
            weight_bytes=weight_bytes,
            streamed_bytes=streamed_bytes,
            compute=options.changed()
            | {"dtype": name_of(self.dtype)}
            | ({"weights": model.fingerprint} if model.fingerprint is not None else {}),
        )

    def needed(self) -> list[str]:
        """Return the components with weights that the role needs, of those that the model has."""
        role, layout = self.role, self.layout
        phases: dict[Phase, bool] = {"embed": role.embed, "encode": role.encode, "step": True, "decode": role.decode}
        found = layout.of_phases(*(phase for phase, is_done in phases.items() if is_done))
        found |= {each for each in layout.denoisers if role.has(each)}
        return [each for each in layout.weighted if class_in(self._index, each) is not None and each in found]

    @cached_property
    def _index(self) -> dict[str, Any]:
        return read_index(self.path, self.name, self.layout)

    def class_of(self, component: str) -> Any:
        """Return the class of diffusers or transformers that a component is loaded as."""
        named = class_in(self._index, component)
        return class_of(self.layout, component, named if component in self.layout.as_named else None)

    def dtype_of(self, component: str) -> torch.dtype:
        """Return the dtype that a component is loaded in."""
        dtype: torch.dtype = getattr(torch, self.layout.dtype_of(component, name_of(self.dtype)))
        return dtype

    def load_pipeline(self, pipeline_class: str, device: torch.device, options: ComputeOptions) -> Any:
        """Load a diffusers pipeline whose other components are None.

        Weights are mapped from their files, and converted, quantized and copied to a GPU one by one. On a CPU, weights
        that already have the dtype stay mapped, so that all ranks of a host share their pages. Raises InputError if a
        component cannot be loaded, for whatever reason.
        """
        be_quiet()
        import diffusers

        layout = self.layout
        parts: dict[str, Any] = dict.fromkeys(layout.components)
        # In rounds, the others come when they are needed. diffusers reads sizes from the VAE.
        for each in ["vae"] if self.role.in_rounds else self.needed():
            if self.role.leaves == "nothing" or each not in layout.of_phases("embed"):
                parts[each] = self.load_for(each, device, options)
        with in_a_sentence(f"The model {self.name}", device, self._needed_bytes):
            parts |= self._without_weights()
            beside = {each: parts.pop(each) for each in layout.beside}
            pipeline: Any = getattr(diffusers, layout.runs or pipeline_class)(**parts)
            for each, module in beside.items():
                setattr(pipeline, each, module)
            if pipeline.vae is not None:
                if not self.role.encode:
                    pipeline.vae.encoder = pipeline.vae.quant_conv = None
                if not self.role.decode:
                    pipeline.vae.decoder = pipeline.vae.post_quant_conv = None
            return pipeline

    def load_for(self, component: str, device: torch.device, options: ComputeOptions) -> Any:
        """Load one component as the options say, a denoising one configured; raises InputError for whatever reason."""
        with in_a_sentence(f"The {component} of the model {self.name}", device, self._needed_bytes):
            if options.quantizes and importlib.util.find_spec("comfy_kitchen") is None:
                raise InputError(f"--approximate int8 needs the package comfy-kitchen; {how_to_install('int8')}.")
            is_denoiser, keeping = component in self.layout.denoisers, None
            if options.weights == "stored" or (is_denoiser and options.multiplied):
                keeping = Keeping(
                    blocks=self.layout.blocks,
                    native=options.multiplied if is_denoiser else (),
                    quantizes=options.quantizes and is_denoiser,
                    device=device,
                )
            if self.is_streamed(component):
                return stream_layers(self.load(component, torch.device("cpu"), keeping), device)
            if not is_denoiser:
                return self.load(component, device, keeping)
            where = torch.device("cpu") if options.offload == "blocks" else device
            return apply(self.load(component, where, keeping), options, self.layout.blocks, device)

    def is_streamed(self, component: str) -> bool:
        """Return whether the layers of a text encoder come from host memory one by one."""
        return component in self.layout.streamed and (self.role.in_rounds or self.role.leaves != "nothing")

    def _without_weights(self) -> dict[str, Any]:
        """Load the scheduler and, to encode, the tokenizer and the image processor; return all settings, too."""
        import diffusers
        import transformers

        index = self._index
        parts: dict[str, Any] = {name: index[name] for name in self.layout.settings if name in index}
        for component in self.layout.components.keys() - {*self.layout.weighted}:
            kind: Any = class_in(index, component)
            if component == "scheduler":
                parts[component] = getattr(diffusers, kind).from_pretrained(self.path / component)
            elif component == "tokenizer" and self.role.embed:
                folder = self.path / component
                parts[component] = (
                    transformers.AutoTokenizer.from_pretrained(folder)
                    if (folder / "tokenizer.json").is_file() or "text_encoder" not in self.model.weights
                    else load_tokenizer(self.model.weights["text_encoder"])
                )
            elif component != "tokenizer" and kind is not None and self.role.encode:
                # Old models name a class that is gone; a composite processor would want a tokenizer, too.
                named = None if kind == "CLIPProcessor" else getattr(transformers, kind, None)
                parts[component] = (named or transformers.CLIPImageProcessor).from_pretrained(self.path / component)
        return parts

    def _needed_bytes(self) -> int:
        sizes = [self.dtype_of(each).itemsize * sum(self._numbers(each)) for each in self.needed()]
        return max(sizes) if self.role.in_rounds else sum(sizes)

    def files(self, component: str) -> list[Path]:
        """Return the files that a component's weights are in."""
        given = self.model.weights
        return self.layout.weights_files(given, component) if component in given else self._files(component)

    def _numbers(self, component: str) -> Iterator[int]:
        names = self.layout.file_names.get(component)
        return (each.number for file in self.files(component) for each in weights_in(file, names))

    def _files(self, component: str) -> list[Path]:
        return loaded_files(self.path, component, WEIGHTS[name_of(self.dtype_of(component))])

    def load(self, component: str, device: torch.device, keeping: Keeping | None = None) -> Any:
        """Load one component; raises InputError if a weight is missing."""
        kind = self.class_of(component)
        is_changed = component in self.model.weights or any(lora.component == component for lora in self.model.loras)
        if is_changed or (keeping is not None and keeping.quantizes) or is_rounded(self._files(component)):
            return self._assemble(kind, component, device, keeping)
        variant = "fp16" if is_half(self._files(component)[0].name) else None
        model, loading = kind.from_pretrained(
            self.path / component,
            output_loading_info=True,
            variant=variant,
            dtype=self.dtype_of(component),
            use_safetensors=True,
            local_files_only=True,
            **({"device_map": {"": device}} if device.type != "cpu" else {}),
        )
        self._check_complete(component, loading["missing_keys"])
        return model

    def _assemble(self, kind: Any, component: str, device: torch.device, keeping: Keeping | None) -> Any:
        model, stored, loras = self.open_changed(kind, component)
        for warning in (*self.warnings(component), *(warning for lora in loras for warning in warnings_of(lora))):
            logger.warning("%s", warning)
        load_weights(model, stored, loras, dtype=self.dtype_of(component), device=device, keeping=keeping)
        return model

    def open_changed(self, kind: Any, component: str) -> tuple[Any, dict[str, Stored], list[Lora]]:
        """Open the files of a component that a model file changes, and match them to its config."""
        model = empty_component(kind, read_json(self.path, f"{component}/config.json", self.name))
        names = self.layout.file_names.get(component, FileNames())
        if component in self.model.weights:
            without(model, names.unused)
        shapes, rename = shapes_of(model), renaming(kind, names)
        if component in self.model.weights:
            stored: dict[str, Stored] = {}
            for file in reversed(self.files(component)):
                stored |= open_file(file, shapes, rename, names.raised_norms)
        else:
            stored = open_folder(self._files(component))
        if component in self.model.weights and stored and not shapes.keys() & stored.keys():
            raise InputError(
                f"The file {self.model.weights[component]} has no weight of the {component} of the model {self.name} "
                f"by a name that svdq knows, but {min(stored)}; give one with diffusers' names."
            )
        self._check_complete(component, shapes.keys() - stored.keys())
        if component in self.model.weights and component in self.layout.denoisers:
            self._check_known(component, stored.keys() - shapes.keys(), {name.partition(".")[0] for name in shapes})
        for name, shape in shapes.items():
            if stored[name].num_elements != math.prod(shape):
                raise InputError(
                    f"The {component} of the model {self.name} does not fit its config{self._of(component)}: {name} "
                    f"has {stored[name].num_elements:,} numbers in place of {math.prod(shape):,}; give another file."
                )
        loras = [open_lora(lora, shapes, rename) for lora in self.model.loras if lora.component == component]
        return model, stored, loras

    def warnings(self, component: str) -> Iterator[str]:
        """Yield a sentence if a component's file does not say that it has the version that the model needs."""
        file, version = self.model.weights.get(component), self.layout.versions.get(self.class_of(component).__name__)
        if file is not None and version is not None and version not in metadata_of(file):
            yield (
                f"The {component} {file} does not say that it is {version}, which {self.model.base} needs: other "
                "versions have the same shapes, and make videos that do not follow their prompts."
            )

    def denoisers(self) -> list[str]:
        """Return all denoising components that the model has."""
        return [each for each in self.layout.weighted if each in self.layout.denoisers and class_in(self._index, each)]

    def open_lora(self, lora: LoraFile) -> Lora:
        """Match a LoRA to the weights of its component, without reading either; may raise InputError."""
        kind, names = self.class_of(lora.component), self.layout.file_names.get(lora.component, FileNames())
        if lora.component not in self._shapes:
            config = read_json(self.path, f"{lora.component}/config.json", self.name)
            self._shapes[lora.component] = shapes_of(empty_component(kind, config))
        return open_lora(lora, self._shapes[lora.component], renaming(kind, names))

    def _of(self, component: str) -> str:
        return f" in {self.model.weights[component]}" if component in self.model.weights else ""

    def _check_known(self, component: str, others: Collection[str], parts: Collection[str]) -> None:
        """Refuse weights in `parts` of a component that its config lacks: it is of another model."""
        if unknown := [name for name in others if name.partition(".")[0] in parts]:
            raise InputError(
                f"The file {self.model.weights[component]} is of another model: the {component} of {self.model.base} "
                f"has no {min(unknown)}; give another file, or the base that it belongs to."
            )

    def _check_complete(self, component: str, missing: Collection[str]) -> None:
        if missing:
            how = "get the model again, or one whose files belong to its config"
            if component in self.model.weights:
                how = f"give a file that has a whole {component} of this model"
            raise InputError(
                f"The {component} of the model {self.name} lacks {len(missing)} of its weights{self._of(component)}, "
                f"such as {min(missing)}; {how}."
            )


def check_model_file(model: ResolvedModel, layout: FolderLayout) -> Iterator[str]:
    """Yield a sentence about each file that a model file names, and warnings; reads headers only."""
    be_quiet()
    loader = ComponentLoader(model=model, layout=layout, role=Role(), dtype=torch.float16)
    for component in sorted({*model.weights, *(lora.component for lora in model.loras)}):
        _, _, loras = loader.open_changed(loader.class_of(component), component)
        if component in model.weights:
            yield f"{component}: all weights are in {model.weights[component]}."
            yield from loader.warnings(component)
        for lora in loras:
            yield f"{component}: {lora.file} changes {len(lora.parts)} weights."
            yield from warnings_of(lora)


def class_of(layout: FolderLayout, component: str, name: str | None = None) -> Any:
    """Return the class that a component is loaded as: the first of its layout, unless a `name` is given."""
    name = name or layout.components[component][0]
    return next(kind for module in layout.modules if (kind := getattr(importlib.import_module(module), name, None)))


def check_installation(layouts: Iterable[FolderLayout]) -> None:
    """Import the classes of some layouts' components, as a rank does; raises InputError if a package is broken."""
    be_quiet()
    with in_a_sentence("A model", torch.device("cpu")):
        for layout in layouts:
            for component in layout.weighted:
                class_of(layout, component)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as float16."""
    return str(dtype).removeprefix("torch.")


def be_quiet() -> None:
    """Suppress the libraries' progress bars and advice (such as to install torchvision) in a worker's log."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    # diffusers imports torchao if it is installed, which warns about each of its GPU parts that does not match.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
