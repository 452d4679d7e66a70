"""Writes what was read of a workflow as a model file, and the command that submits the same video."""

import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.folders import Folders, about_bytes
from svdq.pipeline.models.comfyui.recipe import Recipe
from svdq.pipeline.models.families import FAMILIES
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES, ModelFile

#: Components in the files of LTX-2, by kind; how much of the connectors is in a file differs.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("transformer", "connectors", "vae", "audio_vae", "vocoder"),
    "audio_vae": ("audio_vae", "vocoder"),
    "connectors": (),
}
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
        number = sum(sizes.get(each, 0) for each in _PARTS.get(kind, (kind,))) or None
        about = "" if number is None else size_text(about_bytes(name, number))
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
            notes.append(f"The {component} {name} is no safetensors or GGUF file; svdq takes that of the base.")
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

    arguments = ["submit", photo(source.photo, "photo.jpg")]
    if source.has_last_photo:
        arguments += ["--last", photo(source.last_photo, "last.jpg")]
    if source.prompt is not None:
        arguments += ["--prompt", source.prompt]
    arguments += ["--size", "auto" if source.size is None else "{}x{}".format(*source.size)]
    if recipe.seed is not None and recipe.seed <= _MAX_SEED:
        arguments += ["--seed", str(recipe.seed)]
    return tuple(arguments)


def command(imported: Imported, model: str) -> str:
    """Return the command line that makes the video of a workflow with its model file."""
    return f"SVDQ_MODEL={shlex.quote(model)} svdq {shlex.join(imported.submit)}"
