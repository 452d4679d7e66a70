"""From the name of a model to its folder and all that is known of it; fetches models from the hub.

A name is `preview`, `simulated` with its costs, a folder, or a hub id whose files are in the hub's cache. Only `pull`
uses the network. Does not import torch.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install, reason_of
from svdq.pipeline.models.families import FAMILIES, family_of
from svdq.pipeline.models.family import FolderLayout
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_folder import (
    DTYPES,
    WEIGHTS,
    check_folder,
    class_in,
    is_half,
    loaded_files,
    pipeline_of,
    read_json,
    weight_files,
)
from svdq.pipeline.models.resolved_model import ResolvedModel, Timings

#: The form of a hub id: organisation/model, optionally with @ and a branch, tag or commit.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")
#: The pipeline's index; the hub's cache finds a model by it.
INDEX = "model_index.json"
#: Timeout of the hub's answers in seconds.
_TIMEOUT_S = 30.0
#: Samples of a file for its fingerprint, and the bytes of each.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def has_weights(name: str) -> bool:
    """Return whether a model's name, as in SVDQ_MODEL, is a folder or a hub id, not a model made in code."""
    return name != "preview" and name.partition(":")[0] != "simulated"


def timings_of(name: str) -> Timings:
    """Parse the name `simulated` or `simulated:step_ms=50,decode_ms=100`.

    Raises:
        InputError: a setting is unknown or not a number.
    """
    items = [item.partition("=") for item in filter(None, name.partition(":")[2].split(","))]
    try:
        return Timings.model_validate({key: value for key, _, value in items})
    except ValidationError as error:
        raise InputError(
            f"The model {name!r} cannot be simulated ({error.errors()[0]['msg']}); write it like "
            f"simulated:step_ms=50,decode_ms=100 with any of {', '.join(Timings.model_fields)}."
        ) from error


def find_folder(name: str) -> Path:
    """Return the folder of a model on this machine; never fetches one.

    Raises:
        InputError: the folder does not exist, or the hub id's files are not in the cache.
    """
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, an unknown user's home
        raise InputError(f"The model folder {name!r} cannot be read ({error}); give another.") from error
    if exists or not HUB_ID.fullmatch(name):
        raise InputError(
            f"There is no model folder {name!r}; SVDQ_MODEL must be a diffusers folder, a hub id such as "
            "stabilityai/stable-video-diffusion-img2vid-xt, or preview."
        )
    found = _cached(name)
    if found is None:
        raise InputError(f"The model {name} is not on this machine; fetch it with `svdq model pull {name}`.")
    return found


def _cached(name: str) -> Path | None:
    repository, revision = _split_id(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, INDEX, revision=revision)
    except (ImportError, ValueError):  # the hub allows fewer names than HUB_ID
        return None
    return Path(found).parent if isinstance(found, str) else None


def _split_id(name: str) -> tuple[str, str | None]:
    """Split a hub id into `organisation/model` and the revision after an @; raise InputError if it is none."""
    if name.count("@") > 1:
        raise InputError(f"{name!r} names two revisions; give one, after an @ or with --revision.")
    if not HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is not a hub id; write it as organisation/model, or organisation/model@revision, such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    repository, _, revision = name.partition("@")
    return repository, revision or None


def resolve(name: str, *, on_gpus: bool | None = None, dtype: str = "auto") -> ResolvedModel:
    """Find a model on this machine, and check it as far as is possible without torch.

    For ranks on GPUs half precision weights do; if `on_gpus` is None and `dtype`, which is that of `ComputeOptions`, is
    auto, all weights in the folder are checked, and there is no fingerprint.

    Raises:
        InputError: the model does not exist here, is not complete, or is none that svdq runs.
    """
    if name == "preview":
        return ResolvedModel(name=name)
    if not has_weights(name):
        return ResolvedModel(name=name, timings=timings_of(name))
    folder = find_folder(name)
    family, layout = family_of(folder, name)
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None and on_gpus is not None:
        torch_dtype = DTYPES[family.half] if on_gpus else "float32"
    check_folder(folder, name, layout, torch_dtype)
    return ResolvedModel(
        name=name,
        folder=folder.absolute(),
        family=family.name,
        layout=layout.pipeline,
        facts=dict(family.read_facts(folder, name)),
        fingerprint=torch_dtype and _fingerprint(folder, _files_of(folder, layout, torch_dtype)),
    )


def _files_of(folder: Path, layout: FolderLayout, dtype: str) -> list[Path]:
    weights = [
        file for each in layout.weighted for file in loaded_files(folder, each, WEIGHTS[layout.dtype_of(each, dtype)])
    ]
    return [folder / INDEX, *sorted(folder.glob("*/*config.json")), *weights]


def _fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and samples of files, which is the same on all machines.

    Reading gigabytes would take minutes, and other weights of a model differ nearly everywhere.
    """
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):  # opening a pipe would block
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        with file.open("rb", buffering=0) as opened:
            for position in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                opened.seek(position)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def family_of_model(name: str) -> str | None:
    """Return the family of a model by its name; None if that is not known on this machine.

    Reads only the model_index.json of a folder, or of a hub id in the cache; without one, the published name counts.
    `preview` and `simulated` render videos of all families.
    """
    if not has_weights(name):
        return None
    try:
        pipeline = pipeline_of(find_folder(name), name)
    except InputError:
        published = PurePosixPath(name).name.lower()
        return next((family.name for family in FAMILIES if published.startswith(family.published_as)), None)
    return next((family.name for family in FAMILIES if pipeline in family.layouts), None)


def pull(name: str, variant: Literal["fp16", "full"], announce: Callable[[str], object]) -> Path:
    """Fetch the files of a model that svdq reads from the hub into its cache; return the folder.

    Without fp16 weights, a model's full ones are fetched. `announce` is called with a sentence about the sizes before.

    Raises:
        InputError: the model or revision does not exist, must not be read, is not supported, or the disk has no room.
        UnavailableError: the hub cannot be reached, or the transfer broke off.
    """
    repository, revision = _split_id(name)
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
        sizes = {file: on_hub[file] for file in _choose(on_hub, variant, layout, read_json(place, INDEX, name))}
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


def _choose(names: Iterable[str], variant: str, layout: FolderLayout, index: dict[str, Any]) -> list[str]:
    chosen = [name for name in names if "/" not in name and (name == INDEX or name.upper().startswith("LICENSE"))]
    for component in layout.components:
        if class_in(index, component) is None:
            continue
        inside = [path.name for path in map(PurePosixPath, names) if str(path.parent) == component]
        weights = weight_files(inside) if component in layout.weighted else []
        half = [name for name in weights if is_half(name)] if variant == "fp16" else []
        # Besides configs, the vocabulary of a tokenizer.
        configs = [name for name in inside if name.endswith((".json", ".model", ".txt")) and ".safetensors" not in name]
        files = configs + (half or [name for name in weights if not is_half(name)])
        chosen += [f"{component}/{name}" for name in files]
    return chosen


def _explain(name: str, error: Exception) -> SvdqError:
    import huggingface_hub as client
    from huggingface_hub import constants, errors

    repository, revision = _split_id(name)
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
