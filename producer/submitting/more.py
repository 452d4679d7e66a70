"""Asks for more videos like a finished one: of its stored photos, with its parameters and other seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job, parse_job
from svdq.producer.name_templates import literal
from svdq.producer.results.fetch import results_of
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photos import Photo, check_data
from svdq.producer.submitting.sources import PhotoRequest


@dataclass(frozen=True, kw_only=True)
class Liked:
    """A finished video of which there are to be more."""

    made: Job
    photo: Photo
    source: str  # of its photo, as in `Photo`

    @property
    def parameters(self) -> dict[str, Any]:
        """What further videos have in common with it, as JSON: all but the seed."""
        return {name: value for name, value in self.made.model_dump(mode="json").items() if name != "seed"}


def read_more(settings: Settings, job_ids: Sequence[str]) -> list[Liked]:
    """Read finished videos with their photos, by prefixes of the ids of their jobs.

    Raises InputError as `results_of`, and if a photo was removed or a video is of another version of svdq.
    """
    storage = Storage.open_for_command(settings.storage)
    found = []
    for result in results_of(settings, storage, job_ids):
        try:
            made = parse_job(result.document.job)
        except ValueError as error:
            raise InputError(f"Job {result.job_id!r} is of another version of svdq; submit its photo.") from error
        if not all(map(storage.exists, made.photos)):
            raise InputError(f"The photo of job {result.job_id!r} was removed from the storage; submit it again.")
        name = PurePosixPath(result.document.source).name or made.name
        contents = map(storage.read_input, made.photos)
        first, *last = (replace(check_data(each, Path(name), settings.max_pixels), data=each) for each in contents)
        photo = replace(first, last=last[0] if last else None)
        found.append(Liked(made=made, photo=photo, source=result.document.source))
    return found


def request_of(liked: Liked, spec: JobSpec) -> PhotoRequest:
    """Ask for new videos beside a finished one, under its name, unless the spec has a folder or a name."""
    photo = liked.photo if spec.name is not None else replace(liked.photo, name=liked.made.name)
    spec = replace(spec, folder=spec.folder or literal(liked.made.folder), force=True)
    return PhotoRequest(path=photo.path, spec=spec, photo=photo, source=liked.source)
