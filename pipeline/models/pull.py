"""Fetching a model from the hub into its cache, from where `hub.find_folder` takes it. Knows no terminal, no torch.

Only what svdq reads is fetched: configs, and the weights in one precision. The branch's name is written last, so that
a model which is half fetched is not taken for one that is here.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.folder_check import WEIGHTS, is_half, weight_files
from svdq.pipeline.models.hub import cached, split_id
from svdq.pipeline.models.hub_errors import explained, hub_client
from svdq.pipeline.models.model_index import COMPONENTS
from svdq.pipeline.models.safetensors_header import file_problem
from svdq.pipeline.models.size_text import size_text

#: fp16 is what GPUs compute in; full is what processors need.
Variant = Literal["fp16", "full"]
#: What names the pipeline; its place in the cache is what a model is found by.
INDEX = "model_index.json"
#: Seconds that the hub may take to answer.
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a model on the hub."""

    #: Path in the repository.
    path: str
    #: Bytes.
    size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be fetched."""

    #: organisation/model, with @revision where one was asked for.
    name: str
    #: The commit that the revision stands for.
    commit: str
    #: Which weights, by what the hub has of those that were asked for.
    variant: Variant
    #: Everything that svdq reads, small files first.
    files: tuple[RemoteFile, ...]
    #: Those of them that are not in the cache, or not whole.
    missing: tuple[RemoteFile, ...]

    @property
    def bytes_missing(self) -> int:
        """Bytes to be fetched."""
        return sum(file.size for file in self.missing)


def cache_folder() -> Path:
    """Give the hub's cache, which HF_HOME and HF_HUB_CACHE move.

    Raises:
        InputError: the hub's client is not installed.
    """
    return Path(hub_client().constants.HF_HUB_CACHE)


def make_plan(name: str, variant: Variant) -> Plan:
    """Ask the hub what a model consists of.

    Args:
        name: a hub id.
        variant: which weights; a model that has no fp16 ones has full ones only.

    Raises:
        InputError: there is no such model or revision, it may not be read, or svdq cannot use it.
        UnavailableError: the hub cannot be reached.
    """
    repository, revision = split_id(name)
    client = hub_client()
    with explained(name):
        found = client.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {sibling.rfilename: int(sibling.size or 0) for sibling in found.siblings or []}
    if INDEX not in sizes:
        raise InputError(
            f"The model {name} has no {INDEX} on the hub; svdq needs a StableVideoDiffusionPipeline in diffusers' "
            "layout, such as stabilityai/stable-video-diffusion-img2vid-xt."
        )
    chosen, variant = _choose(list(sizes), variant)
    files = sorted((RemoteFile(path=path, size=sizes[path]) for path in chosen), key=lambda file: file.size)
    place = _snapshot(repository, found.sha)
    missing = tuple(file for file in files if not _is_whole(place / file.path, file.size))
    return Plan(name=name, commit=found.sha, variant=variant, files=tuple(files), missing=missing)


def check_space(plan: Plan) -> int:
    """Check that the cache's disk holds what is to be fetched; give the bytes that are free.

    Raises:
        InputError: it does not.
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
    """Fetch what is missing and give the model's folder; what is whole is not fetched again.

    Args:
        plan: what `make_plan` has found.
        on_file: told of each file before it is fetched.

    Raises:
        InputError: the files may not be read, or the disk is full.
        UnavailableError: the hub cannot be reached, or the transfer broke off.
    """
    repository, revision = split_id(plan.name)
    client = hub_client()
    place = _snapshot(repository, plan.commit)
    with explained(plan.name):
        for file in plan.missing:
            on_file(file)
            # What is there is broken, or it would not be missing.
            again = (place / file.path).exists()
            client.hf_hub_download(repository, file.path, revision=plan.commit, force_download=again)
        client.hf_hub_download(repository, INDEX, revision=revision)
    folder = cached(plan.name)
    if folder is None or folder.name != plan.commit:
        raise UnavailableError(f"The model {plan.name} was changed on the hub while it was fetched; pull it again.")
    return folder


def _choose(names: list[str], variant: Variant) -> tuple[list[str], Variant]:
    """Choose the files that svdq reads, and say which weights they are."""
    chosen = [name for name in names if "/" not in name and (name == INDEX or name.upper().startswith("LICENSE"))]
    any_half = False
    for component in COMPONENTS:
        inside = [name.partition("/")[2] for name in names if name.startswith(f"{component}/")]
        weights = weight_files(component, inside) if component in WEIGHTS else []
        half = [name for name in weights if is_half(name)]
        full = [name for name in weights if not is_half(name)]
        wanted = half if variant == "fp16" and half else full
        any_half = any_half or wanted == half
        configs = [name for name in inside if name.endswith(".json") and ".safetensors" not in name and "/" not in name]
        chosen += [f"{component}/{name}" for name in configs + wanted]
    return chosen, "fp16" if variant == "fp16" and any_half else "full"


def _snapshot(repository: str, commit: str) -> Path:
    """Give the folder in which the cache has, or will have, a commit's files."""
    return cache_folder() / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def _is_whole(file: Path, size: int) -> bool:
    try:
        if file.stat().st_size != size:
            return False
    except OSError:
        return False
    return file.suffix != ".safetensors" or file_problem(file) is None
