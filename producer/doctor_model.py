"""Whether a model can be rendered with, looked at without torch: its index, its components, every shard's header."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_index import HUB_ID, check_index, read_json
from svdq.producer.doctor import Finding, failure

SUBJECT = "model"
#: The components that have weights, and what their files' names begin with.
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "image_encoder": "model"}
#: What safetensors calls the types that weights are cast from.
DTYPES = {"F16", "BF16", "F32"}
#: Bytes of a header at most, as in the safetensors library.
_MAX_HEADER = 100_000_000
_AGAIN = "fetch the model again"


def check_model(name: str) -> Iterator[Finding]:
    """Look at the model of a name as in SVDQ_MODEL; nothing is fetched.

    Args:
        name: `preview`, `simulated[:…]`, a folder or a hub id.
    """
    kind = name.partition(":")[0]
    folder = Path(name).expanduser()
    if name == "preview":
        yield Finding(subject=SUBJECT, level="ok", text="preview (no diffusion model); SVDQ_MODEL chooses another")
    elif kind == "simulated":
        yield Finding(subject=SUBJECT, level="ok", text=f"{name} (its compute is a sleep, it makes no pictures)")
    elif folder.is_dir():
        yield from _check_folder(folder, name)
    elif folder.exists() or not HUB_ID.fullmatch(name):
        yield Finding(
            subject=SUBJECT,
            level="fail",
            text=f"there is no model folder {name!r}",
            advice="set SVDQ_MODEL to a diffusers folder, a hub id or preview",
        )
    elif (snapshot := _cached(name)) is not None:
        yield from _check_folder(snapshot, name)
    else:
        yield Finding(
            subject=SUBJECT,
            level="warn",
            text=f"{name} is not on this machine",
            advice="`svdq worker` fetches it from the hub when it starts; that takes a while and some 10 GB",
        )


def _check_folder(folder: Path, name: str) -> Iterator[Finding]:
    try:
        check_index(folder, name)
    except InputError as error:
        yield failure(SUBJECT, error)
        return
    problems = [problem for component in WEIGHTS for problem in _problems(folder, component, name)]
    yield from problems
    if not any(problem.level == "fail" for problem in problems):
        size = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
        notice = ", untrained: shows noise" if (folder / "UNTRAINED.md").is_file() else ""
        yield Finding(
            subject=SUBJECT, level="ok", text=f"{name}, a whole StableVideoDiffusionPipeline, {_size(size)}{notice}"
        )


def _problems(folder: Path, component: str, name: str) -> Iterator[Finding]:
    """Find what is wrong with the files of a component that has weights."""
    place, stem = folder / component, WEIGHTS[component]
    try:
        read_json(place / "config.json", name)
        files = set(place.glob(f"{stem}*.safetensors"))
        for index in place.glob(f"{stem}*.safetensors.index*.json"):
            shards = read_json(index, name).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                yield _fail(index, "lists no shards")
                continue
            files |= {place / shard for shard in shards.values()}
    except InputError as error:
        yield failure(SUBJECT, error)
        return
    if not files:
        pickles = any(place.glob("*.bin"))
        yield _fail(
            place,
            "has weights as pickles only (.bin)" if pickles else "has no weights (.safetensors)",
            "svdq reads safetensors only; get the model in that format" if pickles else _AGAIN,
        )
    for file in sorted(files):
        problem = _file_problem(file)
        if problem is not None:
            yield problem
    if files and all(".fp16" in file.name for file in files):
        yield Finding(
            subject=SUBJECT,
            level="warn",
            text=f"{place} has half precision weights only",
            advice="they do for GPUs; to render on a CPU, get the full ones too",
        )


def _file_problem(file: Path) -> Finding | None:
    """Read the header of one safetensors file and say the first thing that is wrong with the file."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == b"version ":
                return _fail(file, "is a Git LFS pointer, not the weights", "run `git lfs pull` in the model's folder")
            length = struct.unpack("<Q", start)[0]
            if length > _MAX_HEADER:
                return _fail(file, "is no safetensors file: its header is corrupt")
            header = json.loads(opened.read(length))
            size = opened.seek(0, 2)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        dtypes = {tensor["dtype"] for name, tensor in tensors.items() if not name.endswith("position_ids")}
    except FileNotFoundError:
        return _fail(file, "is missing")
    except OSError as error:
        return _fail(file, f"cannot be read ({error.strerror})", "mend its permissions or its disk")
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return _fail(file, "is no safetensors file: its header is corrupt")
    if size != end:
        return _fail(file, f"is {size:,} bytes long where its header says {end:,}")
    if not dtypes <= DTYPES:
        wrong = ", ".join(sorted(dtypes - DTYPES))
        return _fail(file, f"holds weights as {wrong}", "get the model in F16, BF16 or F32")
    return None


def _fail(path: Path, text: str, advice: str = _AGAIN) -> Finding:
    return Finding(subject=SUBJECT, level="fail", text=f"{path} {text}", advice=advice)


def _cached(name: str) -> Path | None:
    """Find the folder of a hub id in the hub's cache, without the network."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, "model_index.json")
    return Path(found).parent if isinstance(found, str) else None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
