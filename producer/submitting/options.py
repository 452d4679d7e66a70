"""What the user asks of a video, and making a job of it or saying why not. Knows no storage and no queue."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.parameters import SIZE_MULTIPLE
from svdq.producer.job import Job

#: Drawn seeds have this many bits: as many as a person cares to type again.
SEED_BITS = 32
MAX_SIDE = 4096
#: Videos that may be asked for of one photo at once.
MAX_VIDEOS = 10_000
#: What a job says of its photo and its files, not of its video.
NOT_OF_THE_VIDEO = ("image", "name", "folder")


@dataclass(frozen=True, kw_only=True, slots=True)
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
    #: Drawn for each video when None.
    seed: int | None = None
    formats: tuple[str, ...] | None = None
    fit: str | None = None

    def over(self, job: dict[str, Any]) -> "SubmitOptions":
        """Fill what was not given from the recorded parameters of another job."""
        recorded = {name: value for name, value in job.items() if name not in NOT_OF_THE_VIDEO}
        unknown = recorded.keys() - {field.name for field in fields(self)}
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


def as_flag(field: str) -> str:
    """Spell a parameter as on the command line."""
    return "--format" if field == "formats" else f"--{field.replace('_', '-')}"


def make_job(
    options: SubmitOptions, *, spell: Callable[[str], str] = as_flag, variation: int = 0, **others: Any
) -> Job:
    """Make a job; its seed is drawn when none is given, and that of variation n is n more than the given one.

    Args:
        options: what the user asks for.
        spell: how an error names a parameter.
        variation: number of the variation, from 0.
        others: the fields that are not in `options`.

    Raises:
        InputError: a value is not allowed.
    """
    values = options.given() | others
    if options.seed is None:
        values["seed"] = secrets.randbits(SEED_BITS)
    elif isinstance(options.seed, int):  # files give it any type, which the job then refuses
        values["seed"] = options.seed + variation
    try:
        return Job(**values)
    except ValidationError as error:
        raise InputError(_sentence(error, values, spell)) from error


def _sentence(error: ValidationError, values: dict[str, Any], spell: Callable[[str], str]) -> str:
    """Say the first thing that is wrong: the flag, its value and what is allowed."""
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
    if not field:  # a rule over several parameters, which names them itself
        for name in Job.model_fields:
            allowed = allowed.replace(name, spell(name))
        return f"{allowed}; change one of them."
    value = first["input"]
    # Quotes show that it is a text, such as "7".
    shown = repr(value) if isinstance(value, str) and first["type"].endswith("_type") else value
    return f"{spell(field)} {_shorten(shown)} is not allowed: it must be {allowed}."


def _shorten(value: object) -> str:
    """Show a value of a foreign file in a sentence."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def nearest_side(pixels: int) -> int:
    """Return the allowed side of a video that is nearest to `pixels`."""
    return round(min(max(pixels, SIZE_MULTIPLE), MAX_SIDE) / SIZE_MULTIPLE) * SIZE_MULTIPLE
