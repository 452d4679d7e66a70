"""Writes a copy of a model folder with its large components in half precision, as `svdq model convert` does.

Files are mapped and written in shards of a few gigabytes, so that the largest models need little memory. Weights that
diffusers and transformers keep in float32 stay so: opened in that dtype, copy and original have the same bits.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.components import be_quiet
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_folder import loaded_files, read_json, weight_files, writing
from svdq.pipeline.models.resolved_model import ResolvedModel

#: Bytes of weights in a file of the copy, and so about the memory that writing it takes.
SHARD_BYTES = 2 * 1024**3
#: Copied as they are: small, and in half precision their pixels differ more than they save.
_UNCHANGED = ("vae", "image_encoder")


@dataclass(frozen=True, kw_only=True)
class _Weight:
    name: str
    file: Path
    dtype: torch.dtype
    num_bytes: int


def convert(
    model: ResolvedModel,
    target: Path,
    dtype: torch.dtype,
    *,
    on_file: Callable[[str, int], None] = lambda _file, _bytes: None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the copy; the target appears when it is complete.

    Args:
        model: the original.
        target: a folder that does not exist yet.
        dtype: float16 or bfloat16.
        on_file: called with each weights file, below the target, and its bytes before it is written.
        shard_bytes: bytes of weights in a file.

    Returns:
        The bytes of all weights in the copy.

    Raises:
        InputError: the original has no weights, the target exists, or its disk has no room.
    """
    name, source = model.name, model.folder
    if source is None or model.family is None or model.layout is None:
        raise InputError(f"The model {name} has no weights to convert; name the folder or hub id of a model.")
    layout = family_named(model.family).layouts[model.layout]
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; name a folder that does not exist yet.")
    classes = read_json(source, "model_index.json", name)
    weights = {
        component: _weights(
            source / component, _keeps_float32(classes[component][0], classes[component][1], dtype), dtype
        )
        for component in layout.weighted
        if component not in _UNCHANGED and component in classes and classes[component][0]
    }
    copied = _others(source, layout.components, weights)
    total = sum(weight.num_bytes for each in weights.values() for weight in each)
    needed = total + sum(file.stat().st_size for file in copied)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise InputError(
                f"The copy takes {size_text(needed)}, and {target.parent} has {size_text(free)} free; "
                "name a folder on a larger disk."
            )
        with tempfile.TemporaryDirectory(prefix=".svdq-convert-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            partial.mkdir()
            for file in copied:
                place = partial / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
            for component, each in weights.items():
                stem = "diffusion_pytorch_model" if classes[component][0] == "diffusers" else "model"
                _write(partial / component, stem, each, shard_bytes, on_file)
            partial.rename(target)
    return total


def _weights(folder: Path, keeps_float32: Sequence[str], dtype: torch.dtype) -> list[_Weight]:
    """List a component's weights, of the full variant if it has both, with their dtypes in the copy."""
    found = []
    for file in loaded_files(folder.parent, folder.name, (False, True)):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                stored = opened.get_slice(name)
                is_kept = stored.get_dtype() == "F32" and not {*keeps_float32}.isdisjoint(name.split("."))
                wanted = torch.float32 if is_kept else dtype
                num_bytes = torch.Size(stored.get_shape()).numel() * wanted.itemsize
                found.append(_Weight(name=name, file=file, dtype=wanted, num_bytes=num_bytes))
    return found


def _keeps_float32(library: str, class_name: str, dtype: torch.dtype) -> list[str]:
    """Return the modules whose weights a library keeps in float32 if it loads a class in a dtype."""
    be_quiet()
    import diffusers
    import transformers

    kind: Any = getattr(diffusers if library == "diffusers" else transformers, class_name)
    kept = list(getattr(kind, "_keep_in_fp32_modules_strict", None) or [])
    # transformers keeps those for float16 only, diffusers for every dtype.
    if library == "diffusers" or dtype == torch.float16:
        kept += getattr(kind, "_keep_in_fp32_modules", None) or []
    return kept


def _others(source: Path, components: Iterable[str], converted: Collection[str]) -> list[Path]:
    """List the files that are copied: configs, tokenizers, licenses, and the weights that are not converted."""
    files = [file for file in source.iterdir() if file.is_file()]
    for component in components:
        for file in (source / component).rglob("*") if (source / component).is_dir() else ():
            is_weights = bool(weight_files([file.name])) or file.suffix in (".bin", ".pt", ".msgpack", ".h5")
            if file.is_file() and not (component in converted and is_weights):
                files.append(file)
    return sorted({*files})


def _write(
    folder: Path, stem: str, weights: Sequence[_Weight], shard_bytes: int, on_file: Callable[[str, int], None]
) -> None:
    """Write a component's weights in shards, with their index if there are several."""
    folder.mkdir(exist_ok=True)
    by_name = {weight.name: weight for weight in weights}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda weight: weight.num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = [by_name[name] for name in names]
        on_file(f"{folder.name}/{file}", sum(weight.num_bytes for weight in shard))
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in {weight.file for weight in shard}
            }
            tensors = {each.name: opened[each.file].get_tensor(each.name).to(each.dtype) for each in shard}
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
