"""The parameters that a user requests for a video, and their conversion to a job."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.parameters import SIZE_MULTIPLE
from svdq.producer.job import Job

#: Number of bits of random seeds: short enough to type again.
SEED_BITS = 32
MAX_SIDE = 4096
#: Largest number of videos of one photo in a submission.
MAX_VIDEOS = 10_000
#: Fields of a job that describe its photo and files, not its video.
NOT_OF_THE_VIDEO = ("image", "name", "folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """Requested parameters; None means the default. The fields are those of `Job`."""

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
    #: Random for each video when None.
    seed: int | None = None
    formats: tuple[str, ...] | None = None
    fit: str | None = None

    def with_defaults_from(self, job: dict[str, Any]) -> "SubmitOptions":
        """Fill what was not given from the recorded parameters of another job."""
        recorded = {name: value for name, value in job.items() if name not in NOT_OF_THE_VIDEO}
        unknown = recorded.keys() - {field.name for field in fields(self)}
        if unknown:
            raise InputError(
                f"The video has parameters that this version does not support ({', '.join(sorted(unknown))}); "
                "update svdq or give the parameters as flags."
            )
        return SubmitOptions(**{**recorded, **self.given()})

    def given(self) -> dict[str, Any]:
        """Return the parameters that were given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def as_flag(field: str) -> str:
    """Spell a parameter as on the command line."""
    return "--format" if field == "formats" else f"--{field.replace('_', '-')}"


def make_job(
    options: SubmitOptions, *, spell: Callable[[str], str] = as_flag, variation: int = 0, **others: Any
) -> Job:
    """Create a job; the seed is random if none is given, and variation n adds n to a given seed.

    Args:
        options: the requested parameters.
        spell: returns the name of a parameter for errors.
        variation: number of the variation, from 0.
        others: the fields that are not in `options`.

    Raises:
        InputError: a value is not allowed.
    """
    values = options.given() | others
    if options.seed is None:
        values["seed"] = secrets.randbits(SEED_BITS)
    elif isinstance(options.seed, int):  # a value of another type from a file is refused by the job
        values["seed"] = options.seed + variation
    try:
        return Job(**values)
    except ValidationError as error:
        raise InputError(_sentence(error, values, spell)) from error


def _sentence(error: ValidationError, values: dict[str, Any], spell: Callable[[str], str]) -> str:
    """Describe the first error: the flag, its value and what is allowed."""
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in ("width", "height"):
        width = values.get("width", Job.model_fields["width"].default)
        height = values.get("height", Job.model_fields["height"].default)
        hint = ""
        if isinstance(width, int) and isinstance(height, int):
            hint = f"; the nearest such size is {nearest_side(width)}x{nearest_side(height)}"
        return (
            f"{spell('size')} {_shorten(width)}x{_shorten(height)} is not allowed: both sides must be multiples of "
            f"{SIZE_MULTIPLE} from {SIZE_MULTIPLE} to {MAX_SIDE}{hint}."
        )
    allowed = str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if not field:  # a rule about several parameters, which names them itself
        for name in Job.model_fields:
            allowed = allowed.replace(name, spell(name))
        return f"{allowed}; change one of them."
    value = first["input"]
    # Quotes show that the value is text, such as "7".
    shown = repr(value) if isinstance(value, str) and first["type"].endswith("_type") else value
    return f"{spell(field)} {_shorten(shown)} is not allowed: it must be {allowed}."


def _shorten(value: object) -> str:
    """Format a value from a foreign file for a sentence."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def nearest_side(pixels: int) -> int:
    """Return the allowed side of a video that is nearest to `pixels`."""
    return round(min(max(pixels, SIZE_MULTIPLE), MAX_SIDE) / SIZE_MULTIPLE) * SIZE_MULTIPLE
