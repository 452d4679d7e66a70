"""Writes a copy of a model folder with its large components in half precision, as `svdq model convert` does.

Files are mapped and written in shards of a few gigabytes, so that the largest models need little memory. Weights that
diffusers and transformers keep in float32 stay so: opened in that dtype, copy and original have the same bits. The
weights of a .pth file, such as an upscaler's, are written as safetensors.
"""

import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from svdq.pipeline.errors import InputError, reason_of
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.weights.components import be_quiet, class_of
from svdq.pipeline.models.weights.loras import open_safetensors, tensor_of
from svdq.pipeline.models.weights.model_folder import INDEX, is_rounded, loaded_files, read_json, weight_files, writing

SHARD_BYTES = 2 * 1024**3  # bytes of weights in a file of the copy, and so about the memory that writing it takes
_UNREAD = (".bin", ".pt", ".msgpack", ".h5")  # endings of weights files that svdq does not read
#: Where training programs put the weights in a .pth file, the better ones first.
_WEIGHTS_KEYS = ("params_ema", "params", "model_state_dict", "state_dict", "model", "net")


#: Times the size of a .pth file that its weights may take, since some have two names; and bytes that any file may take.
_MOST_SHARED, _SMALL_BYTES = 2, 1 << 20


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
    """Write the copy; the target, which must not exist, appears when it is complete.

    `on_file` is called with each weights file, below the target, and its bytes before it is written. Returns the bytes
    of all weights that were converted to `dtype`, float16 or bfloat16. Raises InputError if the original has no
    weights, the target exists, or its disk has no room.
    """
    name, source = model.name, model.folder
    if source is None:
        raise InputError(f"The model {name} has no weights to convert; name the folder or hub id of a model.")
    if model.base is not None:  # its LoRAs and other weights would not be in the copy
        raise InputError(f"{name!r} is a model file; convert its base {model.base}, and name the copy in it.")
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; name a folder that does not exist yet.")
    layout = layout_of(model)
    classes = read_json(source, INDEX, name)
    be_quiet()
    kinds = {
        component: class_of(layout, component, classes[component][1])
        for component in layout.weighted
        if component not in layout.unconverted | layout.float32 and component in classes and classes[component][0]
    }
    for component in kinds:
        if is_rounded(loaded_files(source, component, (False, True))):
            raise InputError(f"The {component} of {name} is stored in fp8, half of what a copy takes; use it as it is.")
    weights = {component: list(_weights(source, component, kind, dtype)) for component, kind in kinds.items()}
    others = [file for file in source.iterdir() if file.is_file()]
    for component in layout.components:
        files = [file for file in (source / component).rglob("*") if file.is_file()]
        others += [
            file
            for file in files
            if component not in weights or not (weight_files([file.name]) or file.suffix in _UNREAD)
        ]
    total = sum(weight.num_bytes for each in weights.values() for weight in each)
    needed = total + sum(file.stat().st_size for file in others)
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
            for file in others:
                place = partial / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
            for component, each in weights.items():
                stem = "model" if _is_of_transformers(kinds[component]) else "diffusion_pytorch_model"
                _write(partial / component, stem, each, shard_bytes, on_file)
            partial.rename(target)
    return total


def convert_pickle(source: Path, target: Path) -> int:
    """Write the weights in a .pth file as safetensors, unchanged; return their bytes.

    torch reads it with `weights_only=True`, which runs no code of the file; it takes memory for a few times the file.
    Raises InputError if it holds anything else than weights, the target exists or is no .safetensors file, or it cannot
    be written.
    """
    if target.suffix != ".safetensors":
        raise InputError(
            f"The weights of {source} are written as safetensors; name a file such as {source.stem}.safetensors."
        )
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists; name a file that does not exist yet.")
    weights = _weights_in(source)
    num_bytes = sum(weight.nbytes for weight in weights.values())
    # What shares its bytes in the file is written once for each name.
    if num_bytes > max(_MOST_SHARED * source.stat().st_size, _SMALL_BYTES):
        raise InputError(
            f"The weights of {source} would take {size_text(num_bytes)}, and the file has {source.stat().st_size:,} "
            "bytes: they repeat themselves, as no model's do. Get it again, or as .safetensors."
        )
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".svdq-convert-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            try:
                # Cloned, since safetensors refuses tensors that share memory.
                copies = {name: each.clone(memory_format=torch.contiguous_format) for name, each in weights.items()}
                save_file(copies, partial, metadata={"format": "pt"})
            except (KeyError, UnicodeEncodeError) as error:  # such as torch.complex128, and names that are no text
                reason = reason_of(error)
                raise InputError(f"The weights of {source} cannot be safetensors ({reason}); name another.") from error
            partial.rename(target)
    return num_bytes


def _weights_in(source: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a .pth file; raises InputError if it holds anything else, or they are not plain tensors."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as parts:
                # torch does not compress; what others compress could fill the memory.
                if sum(part.file_size for part in parts.infolist()) > source.stat().st_size:
                    raise InputError(f"The file {source} is compressed, as torch writes none; get it again.")
        found = torch.load(source, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"There is no file {source}; correct its name.") from error
    except OSError as error:
        raise InputError(
            f"The file {source} cannot be read ({reason_of(error)}); check its path and rights."
        ) from error
    except Exception as error:  # torch raises many types
        raise InputError(
            f"The file {source} cannot be read as weights alone ({reason_of(error).partition('. ')[0]}); anything else "
            "in it could run code. Get it again, or as .safetensors."
        ) from error
    found = found if isinstance(found, dict) else {}
    found = next((found[key] for key in _WEIGHTS_KEYS if isinstance(found.get(key), dict)), found)
    weights = {name: value for name, value in found.items() if torch.is_tensor(value)}
    if not weights:
        raise InputError(f"The file {source} holds no weights; name another.")
    for name, value in weights.items():
        if not isinstance(name, str):
            raise InputError(f"The file {source} has a weight named {name!r:.80}, which is no text; name another file.")
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or value.is_nested or value.is_quantized:
            raise InputError(
                f"The weight {name!r:.80} of {source} is no plain tensor (but sparse, nested, quantized or empty); "
                "name another file."
            )
    return weights


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def _weights(source: Path, component: str, kind: Any, dtype: torch.dtype) -> Iterator[_Weight]:
    """Yield a component's weights, of the full variant if it has both, with their dtypes in the copy."""
    # Modules that are kept in float32: by transformers some for float16 only, by diffusers for every dtype.
    kept = {*(getattr(kind, "_keep_in_fp32_modules_strict", None) or [])}
    if not _is_of_transformers(kind) or dtype == torch.float16:
        kept |= {*(getattr(kind, "_keep_in_fp32_modules", None) or [])}
    for file in loaded_files(source, component, (False, True)):
        for name, entry in open_safetensors(file, "weights file").entries.items():
            is_kept = entry.dtype == "F32" and not kept.isdisjoint(name.split("."))
            wanted = torch.float32 if is_kept else dtype
            yield _Weight(name=name, file=file, dtype=wanted, num_bytes=math.prod(entry.shape) * wanted.itemsize)


def _write(
    folder: Path, stem: str, weights: Sequence[_Weight], shard_bytes: int, on_file: Callable[[str, int], None]
) -> None:
    folder.mkdir(exist_ok=True)
    by_name = {weight.name: weight for weight in weights}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda weight: weight.num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = sorted((by_name[name] for name in names), key=lambda weight: weight.file)
        on_file(f"{folder.name}/{file}", sum(weight.num_bytes for weight in shard))
        tensors: dict[str, torch.Tensor] = {}
        for path, each in groupby(shard, key=lambda weight: weight.file):
            opened = open_safetensors(path, "weights file")
            tensors |= {weight.name: tensor_of(opened, weight.name).to(weight.dtype) for weight in each}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
