"""Writes what was read of a workflow as a model file, and the command that submits the same video."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.command_line import arguments_of, joined, variable
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.model_chain import UNREAD
from svdq.pipeline.models.comfyui.recipe import Recipe
from svdq.pipeline.models.comfyui_folders import Folders, split_photo
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.model_file import LORA_SUFFIXES, WEIGHTS_SUFFIXES, ModelFile
from svdq.pipeline.models.published_files import quantized_bits


def about_bytes(name: str, num_weights: int) -> int:
    """Estimate the size of a file of so many weights by its name."""
    return int(num_weights * (quantized_bits(name) or (32 if "fp32" in name.lower() else 16)) / 8)


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
    upscaler: Path | None = None  # the file with which workers upscale it


def to_model_file(recipe: Recipe, folders: Folders, workflow: Path, families: Iterable[Family]) -> Imported:
    """Return the model file of a recipe, with the files that are in ComfyUI's folders."""
    missing: dict[Path, Missing] = {}
    notes = [*recipe.notes]
    family = next(family for family in families if recipe.base in family.models)
    base = family.models[recipe.base]

    def place(kind: str, name: str) -> str:
        found = folders.candidates(kind, name)
        if len(found) == 1:
            return str(found[0])
        path = folders.place_for(kind, name)
        if found:
            places = ", ".join(map(str, found))
            notes.append(
                f"The file {name} is there {len(found)} times ({places}); name the one meant in the model file."
            )
            return str(path)
        if UNREAD.search(name.lower()):  # which is said, and is not to be fetched
            return str(path)
        # Of a checkpoint, and of connectors alone, it is not known what else is in the file.
        used_as = [component for component, file in recipe.weights.items() if file == name]
        is_known = "transformer" in used_as if kind == "checkpoint" else used_as != ["connectors"]
        number = sum(base.num_weights.get(each, 0) for each in used_as) if is_known else 0
        about = size_text(about_bytes(name, number)) if number else ""
        url = recipe.urls.get(name.replace("\\", "/").rpartition("/")[2], "")
        missing.setdefault(path, Missing(path=path, about=about, url=url))
        return str(path)

    weights = {}
    for component, name in recipe.weights.items():
        unread = None if component.startswith("transformer") else UNREAD.search(name.lower())
        if name.lower().endswith(WEIGHTS_SUFFIXES) and unread is None:
            weights[component] = place("checkpoint" if name in recipe.checkpoints else component, name)
        else:
            what = f"has weights in {unread[0]}" if unread else "is no safetensors or GGUF file"
            notes.append(f"The {component} {name} {what}; svdq takes the {component} of the base.")
    loras = []
    for component, lora in recipe.loras:
        if lora.file.lower().endswith(LORA_SUFFIXES):
            entry = {"file": place("lora", lora.file), "component": component, "strength": round(lora.strength, 6)}
            loras.append(entry)
        else:
            notes.append(f"The LoRA {lora.file} is no safetensors file; svdq renders without it.")
    upscaler = None if recipe.afterwards.upscaler is None else Path(place("upscaler", recipe.afterwards.upscaler))
    tables: list[tuple[str, Mapping[str, Any]]] = [("[weights]", weights), *(("[[lora]]", lora) for lora in loras)]
    tables += [("[defaults]", recipe.defaults), ("[scheduler]", recipe.scheduler)]
    notes = [*dict.fromkeys(notes)]
    comments = [f"Written by `svdq model import` of {workflow.name!r}."]
    comments += [f"Not carried over: {note}" for note in notes]
    lines = [f"# {' '.join(each.split())}" for each in comments]
    lines.append(f"base = {_toml(recipe.base)}")
    for header, content in tables:
        if content:
            lines += ["", header, *(f"{key} = {_toml(value)}" for key, value in content.items())]
    given = _parsed("\n".join(lines), workflow)
    family.with_model_file(dict(base.facts), given, str(workflow))
    return Imported(
        toml="\n".join(lines) + "\n",
        missing=tuple(missing.values()),
        notes=tuple(notes),
        submit=_submit(recipe, folders),
        upscaler=upscaler,
    )


def _parsed(text: str, workflow: Path) -> ModelFile:
    """Parse a model file; raises InputError if it has values that svdq does not take, such as a strength above 10."""
    try:
        return ModelFile.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise InputError(f"The workflow {str(workflow)!r} has a value that svdq does not take ({error}).") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place}: {first['msg']}, not {str(first['input'])[:40]}"
        raise InputError(f"The workflow {str(workflow)!r} has a value that svdq does not take ({what}).") from error


def _toml(value: Any) -> str:
    """Return a text, number or list as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _submit(recipe: Recipe, folders: Folders) -> tuple[str, ...]:
    source = recipe.source

    def photo(name: str | None, otherwise: str) -> str:
        return otherwise if name is None else str(folders.photo(name) or split_photo(name)[0])

    options: list[str] = []
    if source.has_last_photo:
        options += ["--last", photo(source.last_photo, "last.jpg")]
    if source.prompt is not None:
        options += ["--prompt", source.prompt]
    options += ["--size", "auto" if source.size is None else "{}x{}".format(*source.size)]
    if recipe.seed is not None:
        options += ["--seed", str(recipe.seed)]
    options += recipe.afterwards.options
    return arguments_of("submit", photo(source.photo, "photo.jpg"), options=options)


def command(imported: Imported, model: str) -> str:
    """Return the command line that makes the video of a workflow with its model file."""
    return f"{variable('SVDQ_MODEL', model)} {joined(imported.submit)}"
