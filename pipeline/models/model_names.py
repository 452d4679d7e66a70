"""From the name of a model to its folder and all that is known of it. Never uses the network.

A name is `preview`, `simulated` with its costs, a folder, or a hub id whose files are in the hub's cache. The module
also has the hub's client, for `pull`, and converts its errors to sentences. Does not import torch.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError
from svdq.pipeline.installed import how_to_install
from svdq.pipeline.models.resolved_model import ResolvedModel, Timings

if TYPE_CHECKING:
    from svdq.pipeline.models.folder_check import Layout

#: The form of a hub id: organisation/model, optionally with @ and a branch, tag or commit.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")


def has_weights(name: str) -> bool:
    """Return whether a model's name, as in SVDQ_MODEL, is a folder or a hub id, not a model made in code."""
    return name != "preview" and name.partition(":")[0] != "simulated"


def split_id(name: str) -> tuple[str, str | None]:
    """Split a hub id into `organisation/model` and the revision after an @, if there is one.

    Raises:
        InputError: the name is not a hub id.
    """
    if name.count("@") > 1:
        raise InputError(f"{name!r} names two revisions; give one, after an @ or with --revision.")
    if not HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is not a hub id; write it as organisation/model, or organisation/model@revision, such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    repository, _, revision = name.partition("@")
    return repository, revision or None


def timings_of(name: str) -> Timings:
    """Parse the name `simulated` or `simulated:step_ms=50,decode_ms=100`.

    Raises:
        InputError: a setting is unknown or not a number.
    """
    settings: dict[str, Any] = {}
    for item in filter(None, name.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        settings[key] = value
    try:
        return Timings.model_validate(settings)
    except ValidationError as error:
        raise InputError(
            f"The model {name!r} cannot be simulated ({error.errors()[0]['msg']}); write it like "
            f"simulated:step_ms=50,decode_ms=100 with any of {', '.join(Timings.model_fields)}."
        ) from error


def cached(name: str) -> Path | None:
    """Return the folder of a hub id in the hub's cache; None if it is not there."""
    repository, revision = split_id(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repository, "model_index.json", revision=revision)
    except ValueError:  # the hub allows fewer names than HUB_ID
        return None
    return Path(found).parent if isinstance(found, str) else None


def find_folder(name: str) -> Path:
    """Return the folder of a model on this machine.

    Never fetches a model: seven ranks would start at once, without visible progress.

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
    found = cached(name)
    if found is None:
        raise InputError(f"The model {name} is not on this machine; fetch it with `svdq model pull {name}`.")
    return found


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
    # Imported on demand, since commands that only read the name of a model need none of it.
    from svdq.pipeline.models.families import family_of, layout_of
    from svdq.pipeline.models.folder_check import check_folder
    from svdq.pipeline.models.folder_files import DTYPES

    folder = find_folder(name)
    family, layout = family_of(folder, name), layout_of(folder, name)
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
        fingerprint=torch_dtype and _fingerprint(folder, layout, torch_dtype),
    )


def _fingerprint(folder: Path, layout: "Layout", dtype: str) -> str:
    """Return a hash by which weights and configs under the same name can be distinguished.

    A rank cannot compute it, since it opens no weights of an expert that it does not load.
    """
    from svdq.pipeline.models.folder_files import WEIGHTS, fingerprint, loaded_files

    weights = [
        file for each in layout.weighted for file in loaded_files(folder, each, WEIGHTS[layout.dtype_of(each, dtype)])
    ]
    return fingerprint(folder, [folder / "model_index.json", *sorted(folder.glob("*/*config.json")), *weights])


def family_of_model(name: str) -> str | None:
    """Return the family of a model by its name; None if that is not known on this machine.

    Reads only the model_index.json of a folder, or of a hub id in the cache; without one, the published name counts.
    `preview` and `simulated` render videos of all families.
    """
    from svdq.pipeline.models.families import FAMILIES
    from svdq.pipeline.models.folder_check import pipeline_of

    if not has_weights(name):
        return None
    try:
        pipeline = pipeline_of(find_folder(name), name)
    except InputError:
        published = PurePosixPath(name).name.lower()
        return next((family.name for family in FAMILIES if published.startswith(family.published_as)), None)
    return next((family.name for family in FAMILIES if pipeline in family.layouts), None)


def hub_client() -> Any:
    """Import the hub's client, which reads its settings (HF_HOME, HF_ENDPOINT, HF_TOKEN) from the environment.

    Raises:
        InputError: the client is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils.logging
    except ImportError as error:
        raise InputError(
            f"Fetching models needs the hub's client (huggingface_hub); {how_to_install('worker')}."
        ) from error
    # Its own advice (tokens, symbolic links, retries) would mix with our output.
    huggingface_hub.utils.logging.set_verbosity_error()
    return huggingface_hub


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Convert errors of the hub's client in a block to errors of ours.

    Raises:
        InputError: the model does not exist, must not be read or cannot be stored.
        UnavailableError: the hub cannot be reached or the transfer broke off.
    """
    try:
        yield
    except Exception as error:
        raise _explain(name, error) from error


def _explain(name: str, error: Exception) -> SvdqError:
    client = hub_client()
    errors, (repository, revision) = client.errors, split_id(name)
    hub = client.constants.ENDPOINT
    page, cache = f"{hub}/{repository}", client.constants.HF_HUB_CACHE
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
            return InputError(f"The hub has no model {repository} (404); check the id at {hub}.")
        if status in (401, 403):
            return InputError(_no_access(client, repository, page, status))
        return UnavailableError(f"The hub did not send {name} ({status}); try again later: complete files are kept.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"The disk of {cache} is full; free some, or set HF_HOME to a folder on a larger disk.")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return InputError(f"{cache} cannot be written ({error.strerror}); set HF_HOME to a writable folder.")
    reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")[:160] or type(error).__name__
    return UnavailableError(
        f"The hub at {hub} cannot be reached or broke off while {name} was fetched ({reason}); check the network and "
        "pull again: complete files are kept."
    )


def _no_access(client: Any, repository: str, page: str, status: int) -> str:
    if client.get_token() is None:
        return (
            f"The hub gives {repository} only to accounts that have accepted its license ({status}): accept it at "
            f"{page}, create a token with read access there, set HF_TOKEN to it, and pull again."
        )
    return (
        f"The hub does not give {repository} to the account of your token ({status}): accept the license at {page} "
        "with that account, and check that HF_TOKEN is valid and may read models with a license to accept."
    )
