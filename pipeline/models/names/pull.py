"""Fetches from the hub into its cache the files of a model that svdq reads, or a model file names. Without torch."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install, reason_of
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.family import FolderLayout
from svdq.pipeline.models.model_file import (
    LORA_SUFFIXES,
    WEIGHTS_SUFFIXES,
    find_file,
    in_cache,
    in_comfyui,
    read_model_file,
    split_hub_file,
)
from svdq.pipeline.models.names.model_names import configs_of, shipped_configs, split_id
from svdq.pipeline.models.weights.model_folder import INDEX, class_in, is_half, read_json, weight_files

#: The weights to fetch: in half precision, for GPUs, or full.
Variant = Literal["fp16", "full"]

_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Download:
    """The files that are wanted of a repository of the hub."""

    repository: str
    revision: str | None
    commit: str
    folder: Path  # of this commit in the hub's cache
    sizes: Mapping[str, int]  # bytes of each file
    missing: tuple[str, ...]  # the files that are not on this machine

    @property
    def missing_bytes(self) -> int:
        """The bytes of the files that are not on this machine."""
        return sum(self.sizes[file] for file in self.missing)


def pull_model_file(path: Path, variant: Variant, announce: Callable[[str], object]) -> None:
    """Fetch what a model file names on the hub, and nothing of the base that it replaces; raises as `pull`.

    Files that are in ComfyUI's folders under the same name, and of the size on the hub, are not fetched.
    """
    downloads = downloads_of(path, variant)
    _announce(path.stem, downloads, announce)
    for each in downloads:
        _fetch(each)
    given = read_model_file(path)
    # The text encoder's file is here now, and may lack the tokenizer.
    if shipped_configs(given) is not None and configs_of(given, path) is None:
        pull(given.base, variant, announce, replaced=given.weights)


def downloads_of(path: Path, variant: Variant) -> list[Download]:
    """Return what a model file names on the hub, and what it needs of the base, by asking the hub; raises as `pull`."""
    given = read_model_file(path)
    files: dict[str, tuple[str, ...]] = dict.fromkeys(given.weights.values(), WEIGHTS_SUFFIXES)
    files |= dict.fromkeys([lora.file for lora in given.lora], LORA_SUFFIXES)
    of_hub: dict[str, list[str]] = {}
    for name, suffixes in files.items():
        if hub := split_hub_file(name):
            of_hub.setdefault(hub[0], []).append(hub[1])
        else:  # before gigabytes are fetched in vain
            find_file(name, path, suffixes)
    found = []
    if not Path(given.base).expanduser().is_dir():
        # A text encoder's file that is not here yet probably has the tokenizer inside.
        is_base_needed = configs_of(given, path) is None if not of_hub else shipped_configs(given) is None
        found += [_find_model(given.base, variant, given.weights)] if is_base_needed else []
    return found + [_find_files(repository, names, path) for repository, names in of_hub.items()]


def pull(name: str, variant: Variant, announce: Callable[[str], object], *, replaced: Collection[str] = ()) -> Path:
    """Fetch the files of a model that svdq reads from the hub into its cache; return the folder.

    Weights of components that a model file has `replaced` are not fetched; without fp16 weights, the full ones are.
    `announce` is called with a sentence about the sizes before. Raises UnavailableError if a later try may succeed, and
    InputError for all else: a model that is not there or not supported, or a disk without room.
    """
    found = _find_model(name, variant, replaced)
    _announce(name, [found], announce)
    _fetch(found)
    return found.folder


def cache_folder() -> Path:
    """Return the folder of the hub's cache, or its nearest parent that exists; raises InputError without the client."""
    cache = Path(_client().constants.HF_HUB_CACHE)
    return next(each for each in (cache, *cache.absolute().parents) if each.is_dir())


def _client() -> Any:
    try:
        import huggingface_hub as client
        import huggingface_hub.utils.logging as client_logging
    except ImportError as error:
        raise InputError(
            f"Fetching models needs the hub's client (huggingface_hub); {how_to_install('worker')}."
        ) from error
    # Its own advice (tokens, symbolic links, retries) would mix with our output.
    client_logging.set_verbosity_error()
    return client


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise an error of the hub's client in a block as one of ours, about a repository, perhaps at a revision."""
    try:
        yield
    except SvdqError:
        raise
    except Exception as error:
        raise _explain(name, error) from error


def _find_model(name: str, variant: str, replaced: Collection[str]) -> Download:
    """Ask the hub for the files of a model that svdq reads; fetch its index, and those of weights in parts."""
    repository, revision = split_id(name)
    if Path(name).exists():
        raise InputError(
            f"{name!r} is a folder here, which svdq uses as it is; pull in another directory to fetch the hub's model."
        )
    client = _client()
    with _explained(name):
        commit, on_hub = _listing(client, repository, revision)
        # By its commit, so that the cache does not find the model before it is complete.
        folder = Path(client.hf_hub_download(repository, INDEX, revision=commit)).parent
        layout = family_of(folder, name)[1]

        def parts_in(index: str) -> set[str]:
            """Fetch the index of a component's parts and return their names: others may lie beside them."""
            client.hf_hub_download(repository, index, revision=commit)
            parts = read_json(folder, index, name).get("weight_map")
            return {*parts.values()} if isinstance(parts, dict) else set()

        chosen = _choose(on_hub, variant, layout, read_json(folder, INDEX, name), replaced, parts_in)
        return Download(
            repository=repository,
            revision=revision,
            commit=commit,
            folder=folder,
            sizes={file: on_hub[file] for file in chosen},
            missing=tuple(file for file in chosen if not _has_size(folder / file, on_hub[file])),
        )


def _find_files(repository: str, files: Collection[str], path: Path) -> Download:
    """Ask the hub for the sizes of files that a model file names."""
    client = _client()
    with _explained(repository):
        commit, on_hub = _listing(client, repository, None)
    if absent := [file for file in files if file not in on_hub]:
        raise InputError(
            f"The hub's {repository} has no file {absent[0]}, which the model file {path.stem!r} names; correct it."
        )

    place = Path(client.constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots", commit)

    def is_here(file: str) -> bool:
        # An interrupted pull leaves files that the cache does not find by the revision yet.
        places = (place / file, in_cache(repository, file), in_comfyui(file, path))
        return any(each is not None and _has_size(each, on_hub[file]) for each in places)

    return Download(
        repository=repository,
        revision=None,
        commit=commit,
        folder=place,
        sizes={file: on_hub[file] for file in files},
        missing=tuple(file for file in files if not is_here(file)),
    )


def _listing(client: Any, repository: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """Return the commit of a revision, and the bytes of its files."""
    found = client.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    return found.sha, {sibling.rfilename: int(sibling.size or 0) for sibling in found.siblings or []}


def _announce(name: str, downloads: Sequence[Download], announce: Callable[[str], object]) -> None:
    """Say how much of a model is to be fetched; raises InputError if the disk has no room for it."""
    cache, needed = cache_folder(), sum(each.missing_bytes for each in downloads)
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise InputError(
            f"The model {name} takes {size_text(needed)}, and {_client().constants.HF_HUB_CACHE} has {size_text(free)} "
            "free; free some, or set HF_HOME to a folder on a larger disk."
        )
    number, missing = sum(len(each.sizes) for each in downloads), sum(len(each.missing) for each in downloads)
    what = f"{missing} of {number} files to fetch, {size_text(needed)}" if missing else "all files are here"
    half = ", half precision weights" * any(is_half(file) for each in downloads for file in each.sizes)
    announce(f"{name}: {what}{half}; {size_text(free)} free.")


def _fetch(download: Download) -> None:
    """Fetch the missing files; raises as `pull`."""
    client, repository = _client(), download.repository
    name = f"{repository}@{download.revision}" if download.revision else repository
    with _explained(name):
        for file in download.missing:
            # One of another size would be kept.
            (download.folder / file).resolve().unlink(missing_ok=True)
        if download.missing:
            client.snapshot_download(repository, revision=download.commit, allow_patterns=list(download.missing))
        if not all(_has_size(download.folder / file, download.sizes[file]) for file in download.missing):
            raise UnavailableError(f"The hub did not send all files of {name}; pull it again: complete files are kept.")
        # From now on the cache finds the files by the revision.
        fetched = [file for file in download.sizes if _has_size(download.folder / file, download.sizes[file])]
        for file in [INDEX] if INDEX in download.sizes else fetched:
            client.hf_hub_download(repository, file, revision=download.revision)


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

    repository, _, revision = name.partition("@")
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
