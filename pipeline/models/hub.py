"""Finds models by name: a folder, or a hub id whose files are in the hub's cache. Never uses the network.

It also has the hub's client, for `pull`, and converts its errors to sentences.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError
from svdq.pipeline.installed import how_to_install
from svdq.pipeline.models.names import HUB_ID, split_id


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
