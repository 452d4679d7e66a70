"""Fetches a model from the hub into its cache, where `hub.find_folder` finds it. Does not import torch.

Only what svdq reads is fetched: configs, and the weights in one precision. The branch's name is written last, so that
an incomplete model is not found.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.files import is_half, read_json, read_shapes, weight_files
from svdq.pipeline.models.folder_check import Layout, class_in
from svdq.pipeline.models.hub import cached, explained, hub_client
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.names import split_id
from svdq.pipeline.models.registry import layout_of, needed_pipelines

#: fp16 suits GPUs; CPUs need full.
Variant = Literal["fp16", "full"]
#: The pipeline's index; a model is found by its place in the cache.
INDEX = "model_index.json"
#: Timeout of the hub's answers in seconds.
_TIMEOUT_S = 30.0
#: Components with more bytes of weights than this are looked at: a copy in half precision may be worth it.
LARGE_BYTES = 20_000_000_000


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a model on the hub."""

    #: Path in the repository.
    path: str
    #: Size in bytes.
    size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The files of a model to fetch."""

    #: organisation/model, with @revision if one was requested.
    name: str
    #: The commit of the revision.
    commit: str
    #: The weights to fetch, depending on what the hub has.
    variant: Variant
    #: All files that svdq reads, small files first.
    files: tuple[RemoteFile, ...]
    #: Files that are missing from the cache or incomplete.
    missing: tuple[RemoteFile, ...]
    #: Bytes of each large component whose weights are float32.
    large: dict[str, int]

    @property
    def bytes_missing(self) -> int:
        """Number of bytes to fetch."""
        return sum(file.size for file in self.missing)


def cache_folder() -> Path:
    """Return the hub's cache folder, which HF_HOME and HF_HUB_CACHE change.

    Raises:
        InputError: the hub's client is not installed.
    """
    return Path(hub_client().constants.HF_HUB_CACHE)


def make_plan(name: str, variant: Variant) -> Plan:
    """Look up the files of a model on the hub.

    Without fp16 weights, a model's full ones are chosen.

    Raises:
        InputError: the model or revision does not exist, must not be read, or is not supported.
        UnavailableError: the hub cannot be reached.
    """
    repository, revision = split_id(name)
    client = hub_client()
    with explained(name):
        found = client.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {sibling.rfilename: int(sibling.size or 0) for sibling in found.siblings or []}
    if INDEX not in sizes:
        raise InputError(f"The model {name} has no {INDEX} on the hub; {needed_pipelines()}.")
    with explained(name):
        # By its commit, so that the cache does not find the model before it is complete.
        index_file = client.hf_hub_download(repository, INDEX, revision=found.sha)
    layout = layout_of(Path(index_file).parent, name)
    index = read_json(Path(index_file).parent, INDEX, name)
    components = [each for each in layout.components if class_in(index, each) is not None]
    chosen, variant = _choose(list(sizes), variant, layout, components)
    files = sorted((RemoteFile(path=path, size=sizes[path]) for path in chosen), key=lambda file: file.size)
    place = _snapshot(repository, found.sha)
    missing = tuple(file for file in files if not _is_whole(place / file.path, file.size))
    large = {}
    for component in components:
        weights = [file for file in files if file.path.startswith(f"{component}/")]
        num_bytes = sum(file.size for file in weights)
        if num_bytes > LARGE_BYTES and _is_float32(client, repository, weights[-1].path, found.sha):
            large[component] = num_bytes
    return Plan(name=name, commit=found.sha, variant=variant, files=tuple(files), missing=missing, large=large)


def check_space(plan: Plan) -> int:
    """Check that the cache's disk has room for the files; return the free bytes.

    Raises:
        InputError: the disk does not have enough room.
    """
    folder = cache_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < plan.bytes_missing:
        raise InputError(
            f"The model {plan.name} takes {size_text(plan.bytes_missing)}, and {folder} has {size_text(free)} free; "
            "free some, or set HF_HOME to a folder on a larger disk."
        )
    return free


def pull(plan: Plan, on_file: Callable[[RemoteFile], None]) -> Path:
    """Fetch the missing files and return the model's folder; complete files are not fetched again.

    `on_file` is called with each file before it is fetched.

    Raises:
        InputError: the files must not be read, or the disk is full.
        UnavailableError: the hub cannot be reached, or the transfer broke off.
    """
    repository, revision = split_id(plan.name)
    client = hub_client()
    place = _snapshot(repository, plan.commit)
    with explained(plan.name):
        for file in plan.missing:
            on_file(file)
            # An existing file in the list of missing ones is broken.
            again = (place / file.path).exists()
            client.hf_hub_download(repository, file.path, revision=plan.commit, force_download=again)
        client.hf_hub_download(repository, INDEX, revision=revision)
    folder = cached(plan.name)
    if folder is None or folder.name != plan.commit:
        raise UnavailableError(f"The model {plan.name} was changed on the hub while it was fetched; pull it again.")
    return folder


def _choose(names: list[str], variant: Variant, layout: Layout, components: list[str]) -> tuple[list[str], Variant]:
    """Select the files that svdq reads, and return which weights they contain."""
    chosen = [name for name in names if "/" not in name and (name == INDEX or name.upper().startswith("LICENSE"))]
    any_half = False
    for component in components:
        inside = [name.partition("/")[2] for name in names if name.startswith(f"{component}/")]
        weights = weight_files(inside) if component in layout.weighted else []
        half = [name for name in weights if is_half(name)]
        full = [name for name in weights if not is_half(name)]
        wanted = half if variant == "fp16" and half else full
        any_half = any_half or bool(half and wanted == half)
        # Besides configs, the vocabulary of a tokenizer.
        suffixes = (".json", ".model", ".txt")
        configs = [
            name for name in inside if name.endswith(suffixes) and ".safetensors" not in name and "/" not in name
        ]
        chosen += [f"{component}/{name}" for name in configs + wanted]
    return chosen, "fp16" if variant == "fp16" and any_half else "full"


def _is_float32(client: Any, repository: str, path: str, commit: str) -> bool:
    """Return whether a weights file on the hub is mostly float32; False if its header cannot be read."""
    with contextlib.suppress(Exception):  # only a hint depends on it
        header = client.HfApi().parse_safetensors_file_metadata(repository, path, revision=commit, timeout=_TIMEOUT_S)
        return bool(max(header.parameter_count, key=header.parameter_count.__getitem__) == "F32")
    return False


def _snapshot(repository: str, commit: str) -> Path:
    """Return the folder for a commit's files in the cache."""
    return cache_folder() / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def _is_whole(file: Path, size: int) -> bool:
    try:
        if file.stat().st_size != size:
            return False
    except OSError:
        return False
    return file.suffix != ".safetensors" or not isinstance(read_shapes(file), str)
