"""Writes what was read of a workflow as a model file, and the command that submits the same video."""

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.command_line import arguments_of, joined, variable
from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.comfyui.source import Recipe
from svdq.pipeline.models.families import FAMILIES
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES, ModelFile

#: The folders of each kind of file, the first being where new files belong.
KINDS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoints", "diffusion_models", "unet", "unet_gguf"),
    "transformer": ("diffusion_models", "unet", "unet_gguf", "checkpoints"),
    "transformer_2": ("diffusion_models", "unet", "unet_gguf", "checkpoints"),
    "text_encoder": ("text_encoders", "clip", "clip_gguf"),
    "vae": ("vae", "checkpoints"),
    "audio_vae": ("vae", "checkpoints"),
    "vocoder": ("vae", "checkpoints"),
    "connectors": ("text_encoders", "clip", "checkpoints", "diffusion_models"),
    "latent_upsampler": ("latent_upscale_models", "upscale_models"),
    "image_encoder": ("clip_vision",),
    "lora": ("loras",),
}
EXTRA = "extra_model_paths.yaml"
#: Bits of a weight by a part of a file's name, in its order; of GGUF with the factors of its blocks.
_BITS = (
    ("q8_0", 8.5), ("q6_k", 6.6), ("q5_", 5.6), ("q4_", 4.8), ("q3_", 3.9), ("q2_", 2.9),
    ("fp8", 8), ("e4m3", 8), ("e5m2", 8), ("int8", 8), ("fp32", 32),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Folders:
    """The folders of one ComfyUI."""

    models: Path | None  # its models folder; None: there is no ComfyUI
    extra: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # more folders, by name such as loras

    def find(self, kind: str, name: str) -> Path | None:
        """Return the file that a node names, also where it has been moved to a subfolder; None if it is missing."""
        inside = _relative(name)
        there = [each for each in self._of(kind) if each.is_dir()]
        for folder in there:
            if (folder / inside).is_file():
                return folder / inside
        for folder in there:
            for place, _, files in os.walk(folder, followlinks=True):
                if inside.name in files:
                    return Path(place) / inside.name
        return None

    def place_for(self, kind: str, name: str) -> Path:
        """Return where a missing file belongs."""
        return (self.models or Path("ComfyUI/models")) / KINDS[kind][0] / _relative(name)

    def photo(self, name: str) -> Path | None:
        """Return a photo in ComfyUI's folder of inputs; None if it is not there."""
        found = None if self.models is None else self.models.parent / "input" / _relative(name)
        return found if found is not None and found.is_file() else None

    def _of(self, kind: str) -> list[Path]:
        own = [] if self.models is None else [self.models / name for name in KINDS[kind]]
        return [*own, *(folder for name in KINDS[kind] for folder in self.extra.get(name, ()))]


def _relative(name: str) -> PurePosixPath:
    """Return a node's name of a file as a path inside a folder; on Windows ComfyUI writes backslashes."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return PurePosixPath(*parts or ["_"])


def find_folders(given: Path | None, workflow: Path) -> Folders:
    """Return the folders of the ComfyUI in a given folder, around a workflow, or in the home; may raise InputError."""
    if given is not None:
        if not given.is_dir():
            raise InputError(f"There is no folder {str(given)!r}; give ComfyUI's, or its models folder.")
        models: Path | None = given / "models" if (given / "models").is_dir() else given
    else:
        around = [*workflow.absolute().parents, Path.home() / "ComfyUI", Path("ComfyUI").absolute()]
        found = (each / "models" for each in around)
        models = next(
            (each for each in found if any((each / name).is_dir() for name in KINDS["transformer"][:2])), None
        )
    if models is None:
        return Folders(models=None)
    models = models.absolute()
    files = (each / EXTRA for each in (given or models, models.parent))
    extra = next((_read_extra(file) for file in files if file.is_file()), {})
    return Folders(models=models, extra=extra)


def _read_extra(file: Path) -> dict[str, list[Path]]:
    """Read extra_model_paths.yaml: sections, each with a base_path and folders by name, several on lines."""
    try:
        import yaml
    except ImportError as error:
        raise InputError(f"To read {file} needs the package PyYAML; {how_to_install('worker')}.") from error
    try:
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read ({str(error).splitlines()[0]}); correct it.") from error
    found: dict[str, list[Path]] = {}
    for section in document.values() if isinstance(document, dict) else ():
        if not isinstance(section, dict):
            continue
        base = file.parent / os.path.expandvars(os.path.expanduser(str(section.get("base_path") or "")))
        for name, folders in section.items():
            if isinstance(folders, str) and name not in ("base_path", "is_default"):
                found.setdefault(name, []).extend(base / each.strip() for each in folders.splitlines() if each.strip())
    return found


def about_bytes(name: str, num_weights: int) -> int:
    """Estimate the size of a file of so many weights by its name."""
    lowered = name.lower()
    bits = next((bits for part, bits in _BITS if re.search(rf"(^|[^a-z]){part}", lowered)), 16)
    return int(num_weights * bits / 8)


_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A file that a workflow names and that is not in ComfyUI's folders."""

    path: Path  # where it belongs
    about: str  # its size, as text; "" if that is not known
    url: str  # where it can be had; "" if the workflow does not say

    def __str__(self) -> str:
        return f"{self.path}{self.about and f' (about {self.about})'}{self.url and f': {self.url}'}"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A workflow as a model file."""

    toml: str
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    submit: tuple[str, ...]  # the arguments of svdq that make the same video


def to_model_file(recipe: Recipe, folders: Folders, workflow: Path) -> Imported:
    """Return the model file of a recipe, with the files that are in ComfyUI's folders."""
    missing: list[Missing] = []
    notes = [*recipe.notes]
    sizes = next((family.models[recipe.base].num_weights for family in FAMILIES if recipe.base in family.models), {})

    def place(kind: str, name: str) -> str:
        if (found := folders.find(kind, name)) is not None:
            return str(found)
        # Of a checkpoint, and of connectors alone, it is not known what else is in the file.
        used_as = [component for component, file in recipe.weights.items() if file == name]
        is_known = "transformer" in used_as if kind == "checkpoint" else used_as != ["connectors"]
        number = sum(sizes.get(each, 0) for each in used_as) if is_known else 0
        about = size_text(about_bytes(name, number)) if number else ""
        url = recipe.urls.get(name.replace("\\", "/").rpartition("/")[2], "")
        path = folders.place_for(kind, name)
        if path not in [each.path for each in missing]:
            missing.append(Missing(path=path, about=about, url=url))
        return str(path)

    weights = {}
    for component, name in recipe.weights.items():
        if name.lower().endswith(WEIGHTS_SUFFIXES):
            weights[component] = place("checkpoint" if name in recipe.checkpoints else component, name)
        else:
            what = f"is no safetensors or GGUF file; svdq takes the {component} of the base"
            notes.append(f"The {component} {name} {what}.")
    loras = [
        {"file": place("lora", lora.file), "component": component, "strength": round(lora.strength, 6)}
        for component, lora in recipe.loras
    ]
    tables: list[tuple[str, Mapping[str, Any]]] = [("[weights]", weights), *(("[[lora]]", lora) for lora in loras)]
    tables += [("[defaults]", recipe.defaults), ("[scheduler]", recipe.scheduler)]
    comments = [f"Written by `svdq model import` of {workflow.name!r}."]
    comments += [f"Not carried over: {note}" for note in notes]
    lines = [f"# {' '.join(each.split())}" for each in comments]
    lines.append(f"base = {_toml(recipe.base)}")
    for header, content in tables:
        if content:
            lines += ["", header, *(f"{key} = {_toml(value)}" for key, value in content.items())]
    _check("\n".join(lines), recipe.base, workflow)
    return Imported(
        toml="\n".join(lines) + "\n", missing=tuple(missing), notes=tuple(notes), submit=_submit(recipe, folders)
    )


def _check(text: str, base: str, workflow: Path) -> None:
    """Raise InputError if a model file has values that svdq does not take, such as a strength above 10."""
    try:
        given = ModelFile.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {first['msg']}, not {str(first['input'])[:40]}"
        raise InputError(f"The workflow {str(workflow)!r} has a value that svdq does not take ({what}).") from error
    family = next(family for family in FAMILIES if base in family.models)
    family.with_model_file(dict(family.models[base].facts), given, str(workflow))


def _toml(value: Any) -> str:
    """Return a text, number or list as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _submit(recipe: Recipe, folders: Folders) -> tuple[str, ...]:
    source = recipe.source

    def photo(name: str | None, otherwise: str) -> str:
        return otherwise if name is None else str(folders.photo(name) or name)

    options: list[str] = []
    if source.has_last_photo:
        options += ["--last", photo(source.last_photo, "last.jpg")]
    if source.prompt is not None:
        options += ["--prompt", source.prompt]
    options += ["--size", "auto" if source.size is None else "{}x{}".format(*source.size)]
    if recipe.seed is not None and recipe.seed <= _MAX_SEED:
        options += ["--seed", str(recipe.seed)]
    return arguments_of("submit", photo(source.photo, "photo.jpg"), options=options)


def command(imported: Imported, model: str) -> str:
    """Return the command line that makes the video of a workflow with its model file."""
    return f"{variable('SVDQ_MODEL', model)} {joined(imported.submit)}"
