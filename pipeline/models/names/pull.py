"""Fetches from the hub into its cache the files of a model that svdq reads, or a model file names. Without torch."""

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install, reason_of
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.family import FolderLayout
from svdq.pipeline.models.model_file import LORA_SUFFIXES, WEIGHTS_SUFFIXES, find_file, read_model_file, split_hub_file
from svdq.pipeline.models.names.model_names import INDEX, configs_of, split_id
from svdq.pipeline.models.weights.model_folder import class_in, is_half, read_json, weight_files

_TIMEOUT_S = 30.0


def pull_model_file(path: Path, variant: Literal["fp16", "full"], announce: Callable[[str], object]) -> None:
    """Fetch what a model file names on the hub, and nothing of the base that it replaces; raises as `pull`."""
    given = read_model_file(path)
    files: dict[str, tuple[str, ...]] = dict.fromkeys(given.weights.values(), WEIGHTS_SUFFIXES)
    files |= dict.fromkeys([lora.file for lora in given.lora], LORA_SUFFIXES)
    for name, suffixes in files.items():  # before gigabytes are fetched in vain
        if split_hub_file(name) is None:
            find_file(name, path, suffixes)
    is_hub_file = any(map(split_hub_file, given.weights.values()))  # which may not be here yet
    if not Path(given.base).expanduser().is_dir() and (is_hub_file or configs_of(given, path) is None):
        pull(given.base, variant, announce, replaced=given.weights)
    for name in files:
        if hub := split_hub_file(name):
            try:
                from huggingface_hub import hf_hub_download

                hf_hub_download(*hub)
            except Exception as error:
                raise _explain(hub[0], error) from error


def pull(
    name: str, variant: Literal["fp16", "full"], announce: Callable[[str], object], *, replaced: Collection[str] = ()
) -> Path:
    """Fetch the files of a model that svdq reads from the hub into its cache; return the folder.

    Weights of components that a model file has `replaced` are not fetched; without fp16 weights, the full ones are.
    `announce` is called with a sentence about the sizes before. Raises UnavailableError if a later try may succeed, and
    InputError for all else: a model that is not there or not supported, or a disk without room.
    """
    repository, revision = split_id(name)
    if Path(name).exists():
        raise InputError(
            f"{name!r} is a folder here, which svdq uses as it is; pull in another directory to fetch the hub's model."
        )
    try:
        import huggingface_hub as client
        import huggingface_hub.utils.logging as client_logging
    except ImportError as error:
        raise InputError(
            f"Fetching models needs the hub's client (huggingface_hub); {how_to_install('worker')}."
        ) from error
    # Its own advice (tokens, symbolic links, retries) would mix with our output.
    client_logging.set_verbosity_error()
    try:
        cache = client.constants.HF_HUB_CACHE
        found = client.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        # By its commit, so that the cache does not find the model before it is complete.
        place = Path(client.hf_hub_download(repository, INDEX, revision=found.sha)).parent
        layout = family_of(place, name)[1]
        on_hub = {sibling.rfilename: int(sibling.size or 0) for sibling in found.siblings or []}

        def parts_in(index: str) -> set[str]:
            """Fetch the index of a component's parts and return their names: others may lie beside them."""
            client.hf_hub_download(repository, index, revision=found.sha)
            parts = read_json(place, index, name).get("weight_map")
            return {*parts.values()} if isinstance(parts, dict) else set()

        chosen = _choose(on_hub, variant, layout, read_json(place, INDEX, name), replaced, parts_in)
        sizes = {file: on_hub[file] for file in chosen}
        missing = [file for file in sizes if not _has_size(place / file, sizes[file])]
        needed, free = sum(sizes[file] for file in missing), shutil.disk_usage(place).free
        if free < needed:
            raise InputError(
                f"The model {name} takes {size_text(needed)}, and {cache} has {size_text(free)} free; free some, or "
                "set HF_HOME to a folder on a larger disk."
            )
        fetched = "half precision" if any(map(is_half, sizes)) else "full"
        announce(
            f"{name}: {len(sizes)} files, {fetched} weights; {size_text(needed)} to fetch, {size_text(free)} free."
        )
        for file in missing:
            (place / file).resolve().unlink(missing_ok=True)  # one of another size, which would be kept
        client.snapshot_download(repository, revision=found.sha, allow_patterns=list(sizes))
        if not all(_has_size(place / file, size) for file, size in sizes.items()):
            raise UnavailableError(f"The hub did not send all files of {name}; pull it again: complete files are kept.")
        client.hf_hub_download(repository, INDEX, revision=revision)
    except SvdqError:
        raise
    except Exception as error:
        raise _explain(name, error) from error
    return place


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _choose(
    names: Iterable[str],
    variant: str,
    layout: FolderLayout,
    index: dict[str, Any],
    replaced: Collection[str],
    parts_in: Callable[[str], set[str]],
) -> list[str]:
    chosen = [name for name in names if "/" not in name and (name == INDEX or name.upper().startswith("LICENSE"))]
    for component in layout.components:
        if class_in(index, component) is None and component not in layout.beside:
            continue
        inside = [path.name for path in map(PurePosixPath, names) if str(path.parent) == component]
        weights = weight_files(inside) if component in layout.weighted and component not in replaced else []
        half = [name for name in weights if is_half(name)] if variant == "fp16" else []
        weights = half or [name for name in weights if not is_half(name)]
        if of_parts := next((name for name in weights if name.endswith(".json")), None):
            parts = parts_in(f"{component}/{of_parts}")
            weights = [of_parts, *(name for name in weights if name in parts)]
        # Besides configs, the vocabulary of a tokenizer.
        configs = [name for name in inside if name.endswith((".json", ".model", ".txt")) and ".safetensors" not in name]
        chosen += [f"{component}/{name}" for name in configs + weights]
    return chosen


def _explain(name: str, error: Exception) -> SvdqError:
    import huggingface_hub as client
    from huggingface_hub import constants, errors

    repository, revision = split_id(name)
    page, cache = f"{constants.ENDPOINT}/{repository}", constants.HF_HUB_CACHE
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # A request failed, and the cache does not have the file either.
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputError(f"HF_HUB_OFFLINE is set, so {name} is not fetched; unset it to pull.")
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"The model {repository} has no revision {revision!r}; see {page}.")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 404:
            return InputError(f"The hub has no model {repository}, or lacks a file (404); check the id at {page}.")
        if status in (401, 403):
            how = "with your token" if client.get_token() else "without a token"
            return InputError(
                f"The hub does not give {repository} {how} ({status}): accept its license at {page}, set HF_TOKEN to "
                "a token of the same account with read access, and pull again."
            )
        return UnavailableError(f"The hub did not send {name} ({status}); try again later: complete files are kept.")
    if isinstance(error, OSError) and error.filename is not None:
        return InputError(f"{cache} cannot be written ({error.strerror}); make room, or set HF_HOME to another folder.")
    return UnavailableError(
        f"The hub at {constants.ENDPOINT} cannot be reached or broke off while {name} was fetched "
        f"({reason_of(error)[:160]}); check the network and pull again: complete files are kept."
    )
