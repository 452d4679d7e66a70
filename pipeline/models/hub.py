"""Finds models by name: a folder, or a hub id whose files are in the hub's cache. Never uses the network."""

from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.names import HUB_ID, split_id


def cached(name: str) -> Path | None:
    """Return the folder of a hub id in the hub's cache; None if it is not there."""
    repository, revision = split_id(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repository, "model_index.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def find_folder(name: str) -> Path:
    """Return the folder of a model on this machine.

    Never fetches a model: seven ranks would start at once, without visible progress.

    Args:
        name: a folder or a hub id.

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


def is_from_cache(folder: Path, name: str) -> bool:
    """Return whether `find_folder` found a folder in the hub's cache, and not a folder with that name."""
    return folder != Path(name).expanduser()
