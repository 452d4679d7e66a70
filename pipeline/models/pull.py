"""Fetches a model from the hub into its cache, where `hub.find_folder` finds it. Does not import torch.

Only what svdq reads is fetched: configs, and the weights in one precision. The branch's name is written last, so that
an incomplete model is not found.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.families import layout_of, needed_pipelines
from svdq.pipeline.models.folder_check import Layout, class_in
from svdq.pipeline.models.folder_files import is_half, read_json, weight_files
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_names import cached, explained, hub_client, split_id

#: fp16 suits GPUs; CPUs need full.
Variant = Literal["fp16", "full"]
#: The pipeline's index; a model is found by its place in the cache.
INDEX = "model_index.json"
#: Timeout of the hub's answers in seconds.
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The files of a model to fetch."""

    #: organisation/model, with @revision if one was requested.
    name: str
    #: The commit of the revision.
    commit: str
    #: The weights to fetch, depending on what the hub has.
    variant: Variant
    #: Paths in the repository of all files that svdq reads.
    files: tuple[str, ...]
    #: Those that are missing from the cache or have another size there, small ones first, and their bytes.
    missing: tuple[str, ...]
    bytes_missing: int


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
    files, variant = _choose(list(sizes), variant, layout, components)
    place = Path(index_file).parent
    missing = [file for file in files if not (place / file).exists() or (place / file).stat().st_size != sizes[file]]
    return Plan(
        name=name,
        commit=found.sha,
        variant=variant,
        files=tuple(files),
        missing=tuple(sorted(missing, key=sizes.__getitem__)),
        bytes_missing=sum(sizes[file] for file in missing),
    )


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


def pull(plan: Plan) -> Path:
    """Fetch the missing files with the hub's progress bars, and return the model's folder.

    One by one, since `snapshot_download` takes what is there for all when the hub cannot be reached.

    Raises:
        InputError: the files must not be read, or the disk is full.
        UnavailableError: the hub cannot be reached, or the transfer broke off.
    """
    repository, revision = split_id(plan.name)
    client = hub_client()
    with explained(plan.name):
        for file in plan.missing:
            # One that is there has another size. A transfer that broke off goes on.
            broken = isinstance(client.try_to_load_from_cache(repository, file, revision=plan.commit), str)
            client.hf_hub_download(repository, file, revision=plan.commit, force_download=broken)
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
