"""Models by name: a folder, or a hub id whose files are in the hub's cache. Touches no network, knows no torch."""

from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_index import HUB_ID


def split_id(name: str) -> tuple[str, str | None]:
    """Split a hub id into `organisation/model` and the revision behind an @, if there is one.

    Raises:
        InputError: it is no hub id.
    """
    if name.count("@") > 1:
        raise InputError(f"{name!r} names two revisions; give one, behind an @ or with --revision.")
    if not HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is no hub id; write it as organisation/model, or organisation/model@revision, such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    repository, _, revision = name.partition("@")
    return repository, revision or None


def cached(name: str) -> Path | None:
    """Find the folder of a hub id in the hub's cache; None when it is not there."""
    repository, revision = split_id(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(repository, "model_index.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def find_folder(name: str) -> Path:
    """Find the folder of a model that is on this machine.

    Fetching is never begun here: seven ranks would begin it at once, and nobody would see how far it is.

    Args:
        name: a folder or a hub id.

    Raises:
        InputError: there is no such folder, or the hub id's files are not in the cache.
    """
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # no way in, a name that is too long, a home of nobody's
        raise InputError(f"The model folder {name!r} cannot be looked at ({error}); give another.") from error
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
    """Whether `find_folder` has found a folder in the hub's cache, and not as a folder of the name."""
    return folder != Path(name).expanduser()
