"""Submitting photos: everything is checked first, then stored, then enqueued. Knows no terminal."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.parameters import SIZE_MULTIPLE
from svdq.producer.job import Job
from svdq.producer.photos import Photo, check_photo
from svdq.producer.queue import PRIORITIES, enqueue_once, read_job, session
from svdq.producer.settings import Settings
from svdq.producer.storage import Storage

#: Drawn seeds have this many bits: as many as a person cares to type again.
SEED_BITS = 32
MAX_SIDE = 4096


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What the user asks for; None means the default. The fields are those of `Job`."""

    frames: int | None = None
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    fps: int | None = None
    motion_bucket_id: int | None = None
    noise_aug_strength: float | None = None
    min_guidance_scale: float | None = None
    max_guidance_scale: float | None = None
    decode_chunk_size: int | None = None
    #: Drawn for each photo when None.
    seed: int | None = None
    formats: tuple[str, ...] | None = None
    fit: str | None = None

    def over(self, job: dict[str, Any]) -> "SubmitOptions":
        """Fill what was not given from the recorded parameters of another job."""
        recorded = {name: value for name, value in job.items() if name not in ("image", "name")}
        unknown = recorded.keys() - self.given().keys() - {field.name for field in fields(self)}
        if unknown:
            raise InputError(
                f"The video was made with parameters this version does not know ({', '.join(sorted(unknown))}); "
                "update svdq or give the parameters as flags."
            )
        return SubmitOptions(**{**recorded, **self.given()})

    def given(self) -> dict[str, Any]:
        """Return the parameters that are not left to their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What became of one photo."""

    #: Id of its job.
    id: str
    #: Storage key of the photo.
    image: str
    #: Seed of the job, its recorded one when the job existed.
    seed: int
    #: Status of the job, in RQ's words.
    status: str
    #: Name of the job.
    name: str
    #: Whether it was enqueued now; else the job was there before.
    is_new: bool


def submit(
    settings: Settings, photos: Sequence[Path], options: SubmitOptions, priority: str = "default", force: bool = False
) -> list[Submission]:
    """Submit photos, one job each; a job that exists already is returned as it is unless `force` is set.

    Raises:
        InputError: a photo or a parameter is not allowed; nothing was stored or enqueued.
        UnavailableError: storage or Redis cannot be reached.
    """
    if priority not in PRIORITIES:
        raise InputError(f"There is no priority {priority!r}; choose one of {', '.join(PRIORITIES)}.")
    _make_job(options, image=f"inputs/{'0' * 64}.jpg", name="photo")
    checked = [check_photo(path, settings.max_pixels) for path in photos]
    storage = Storage(settings.storage)
    with session(settings) as connection:
        for photo in checked:
            if not storage.exists(photo.key):
                storage.put_input(photo.read(), photo.extension)
        return [_submit_one(connection, photo, options, priority, force) for photo in checked]


def _submit_one(connection: Any, photo: Photo, options: SubmitOptions, priority: str, force: bool) -> Submission:
    job = _make_job(options, image=photo.key, name=photo.name)
    job_id = job.digest(seed_was_drawn=options.seed is None, nonce=secrets.token_hex(8) if force else "")
    rq_job, is_new = enqueue_once(connection, job, job_id, priority)
    recorded = read_job(rq_job)
    if recorded is None:
        raise SvdqError(f"Job {job_id} is in Redis but its parameters cannot be read; submit with --force.")
    return Submission(
        id=job_id,
        image=recorded.image,
        seed=recorded.seed,
        status=rq_job.get_status(refresh=False).value,
        name=recorded.name,
        is_new=is_new,
    )


def _make_job(options: SubmitOptions, *, image: str, name: str) -> Job:
    values: dict[str, Any] = {"seed": secrets.randbits(SEED_BITS), **options.given(), "image": image, "name": name}
    try:
        return Job(**values)
    except ValidationError as error:
        raise InputError(_sentence(error, values)) from error


def _sentence(error: ValidationError, values: dict[str, Any]) -> str:
    """Say the first thing that is wrong: the flag, its value and what is allowed."""
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in ("width", "height"):
        width = values.get("width", Job.model_fields["width"].default)
        height = values.get("height", Job.model_fields["height"].default)
        return (
            f"--size {width}x{height} is not allowed: both sides must be multiples of {SIZE_MULTIPLE} from "
            f"{SIZE_MULTIPLE} to {MAX_SIDE}; the nearest such size is {nearest_side(width)}x{nearest_side(height)}."
        )
    allowed = str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if not field:  # a rule over several parameters, which names them itself
        for name in Job.model_fields:
            allowed = allowed.replace(name, _flag(name))
        return f"{allowed}; change one of them."
    return f"{_flag(field)} {first['input']} is not allowed: it must be {allowed}."


def _flag(field: str) -> str:
    return "--format" if field == "formats" else f"--{field.replace('_', '-')}"


def nearest_side(pixels: int) -> int:
    """Return the allowed side of a video that is nearest to `pixels`."""
    return min(max(round(pixels / SIZE_MULTIPLE), 1) * SIZE_MULTIPLE, MAX_SIDE)
