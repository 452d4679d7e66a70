"""The parameters that a user requests for a video: parse them from text, and make jobs of them.

The parameters, with their types, limits and defaults, are the fields of the `Job` of each family.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.parameters import MAX_SIDE
from svdq.producer.job import JOBS, VIDEO_FIELDS, Job
from svdq.producer.submitting.sizes import nearest_size

#: Number of bits of random seeds: short enough to type again.
SEED_BITS = 32
#: Largest number of videos of one photo in a submission.
MAX_VIDEOS = 10_000
#: The field of each parameter; of one that several families have, the first.
FIELD_OF: Mapping[str, FieldInfo] = {
    name: field for job in reversed(tuple(JOBS.values())) for name, field in job.model_fields.items()
}
#: All names that `read_field` accepts.
FIELDS = (*VIDEO_FIELDS, "size", "format")

#: Number of pixels of videos whose size is left to the model: it is not known here, and all Wan models can do this one.
_OPEN_AREA = 832 * 480
#: Smallest multiple of sides that are chosen: Wan 2.2 TI2V-5B needs 32, though others of its family take 16.
_AUTO_MULTIPLE = 32
#: How lists and requests write booleans.
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})")
#: The end of a whole number as pandas and spreadsheets write it: 14.0.
_NO_FRACTION = re.compile(r"(?<=\d)\.0+$")
#: The fields of each family's jobs.
_FIELDS: Mapping[str, Collection[str]] = {name: job.model_fields for name, job in JOBS.items()}
#: The families that have prompts.
WITH_PROMPTS = frozenset(name for name, fields in _FIELDS.items() if "prompt" in fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedModel:
    """The model that is expected to make the videos, where its family is known: `submission.expected_model`."""

    name: str
    family: str
    #: Whether it is in the settings; parameters of another family are then refused.
    is_configured: bool = True


def choose_family(
    fields: Collection[str], family: str | None, model: ExpectedModel | None, spell: Callable[[str], str]
) -> str | None:
    """Return the family that all given fields apply to; None if nothing decides.

    `spell` returns the name of a field for errors.

    Raises:
        InputError: a field does not apply to that family, or two fields apply to two families.
    """
    if family is not None and (not isinstance(family, str) or family not in JOBS):  # a file may have anything
        raise InputError(f"{spell('family')} {family} is not allowed: it must be one of {', '.join(JOBS)}.")
    chosen = family or (model.family if model is not None else None)
    wrong = next((field for field in fields if chosen is not None and field not in _FIELDS[chosen]), None)
    if wrong is not None and family is not None:
        raise InputError(
            f"{spell(wrong)} does not apply to {PARAMETERS[family].title} ({spell('family')} {family}), only to "
            f"{_titles(wrong)}; leave out one of the two."
        )
    if wrong is not None and model is not None and model.is_configured:
        there = next(name for name, has in _FIELDS.items() if wrong in has)
        raise InputError(
            f"{spell(wrong)} does not apply to the configured model {model.name}, which is "
            f"{PARAMETERS[model.family].title}; leave it out, or give {spell('family')} {there} if the workers have "
            "such a model."
        )
    fitting = [name for name, has in _FIELDS.items() if all(field in has for field in fields)]
    if not fitting:
        one, other = next(
            pair
            for pair in combinations(fields, 2)
            if not any(pair[0] in has and pair[1] in has for has in _FIELDS.values())
        )
        raise InputError(
            f"{spell(one)} applies only to {_titles(one)} and {spell(other)} only to {_titles(other)}; "
            "leave out one of the two."
        )
    if chosen in fitting:
        return chosen
    return None if len(fitting) == len(JOBS) else fitting[0]


def _titles(field: str) -> str:
    """Name the families that have a field."""
    return " and ".join(PARAMETERS[name].title for name, has in _FIELDS.items() if field in has)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """Requested parameters; None means the default. The fields are those of the jobs of all families."""

    #: `svd` or `wan`; None: that of the other fields or of the expected model.
    family: str | None = None
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
    interpolate: int | None = None
    boomerang: bool | None = None
    prompt: str | None = None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    #: Choose width and height for the shape of each photo; the given ones or the defaults give the number of pixels.
    auto_size: bool | None = None

    def with_defaults_from(self, job: dict[str, Any]) -> "SubmitOptions":
        """Fill what was not given from the recorded parameters of another job."""
        recorded = {"family": DEFAULT_FAMILY} | {
            name: tuple(value) if name == "formats" and isinstance(value, list) else value  # JSON has no tuples
            for name, value in job.items()
            if name not in ("image", "name", "folder")
        }
        unknown = recorded.keys() - set(VIDEO_FIELDS)
        if unknown:
            raise InputError(
                f"The video has parameters that this version does not support ({', '.join(sorted(unknown))}); "
                "update svdq or give all parameters."
            )
        return SubmitOptions(**{**recorded, **self.given()})

    def family_for(self, model: ExpectedModel | None, spell: Callable[[str], str] | None = None) -> str | None:
        """Return the family of models that is to make the video; None if nothing decides, so that it is the default.

        Raises:
            InputError: a parameter does not apply to it; `spell` returns the name of a parameter for errors.
        """
        spell = spell or as_flag
        fields = [name for name in self.given() if name not in ("family", "auto_size")]
        return choose_family(fields, self.family, model, spell)

    def given(self) -> dict[str, Any]:
        """Return the parameters that were given."""
        values = {name: getattr(self, name) for name in (*VIDEO_FIELDS, "auto_size")}
        return {name: value for name, value in values.items() if value is not None}


def as_key(field: str) -> str:
    """Spell a parameter as a column of a list or a key of svdq.toml."""
    return "format" if field == "formats" else field


def as_flag(field: str) -> str:
    """Spell a parameter as on the command line."""
    return f"--{as_key(field).replace('_', '-')}"


def as_text(name: str, value: Any) -> str:
    """Convert a value of JSON to the text that a form or a csv file would have for the parameter `name`.

    Raises:
        InputError: it is not a single value.
    """
    if value is None:
        return ""
    if isinstance(value, list) and name in ("format", "formats"):
        return " ".join(map(str, value))
    if isinstance(value, bool) and FIELD_OF.get(name) and FIELD_OF[name].annotation is bool:
        return str(value).lower()
    if isinstance(value, bool | list | dict):
        raise InputError(f"{name} {_shorten(json.dumps(value))} is not allowed: it must be a single value.")
    return str(value)


def read_field(name: str, text: str, called: str) -> dict[str, Any]:
    """Parse the value of a parameter; the job checks which values are allowed.

    Args:
        name: one of `FIELDS`; `size` is width and height, such as 576x320, or `auto`, or `auto:576x320`; formats are
            separated by spaces: `mp4 gif`.
        text: what the user wrote.
        called: name of the parameter in errors.

    Returns:
        The fields of `SubmitOptions` and their values.

    Raises:
        InputError: the text is not a value of the parameter's type.
    """
    text = text.strip()
    shown = _shorten(text)
    if name == "size":
        auto, colon, of_area = text.lower().partition(":")
        if auto == "auto" and not colon:
            return {"auto_size": True}
        match = _SIZE.fullmatch(of_area if auto == "auto" else text)
        if match is None:
            raise InputError(
                f"{called} {shown} is not a size; write width and height in pixels, such as 1024x576, or auto."
            )
        size = {"width": int(match[1]), "height": int(match[2])}
        return size | ({"auto_size": True} if auto == "auto" else {})
    if name in ("format", "formats"):
        # A repeated format counts once.
        return {"formats": tuple(dict.fromkeys(text.replace(",", " ").split()))}
    annotation = FIELD_OF[name].annotation
    types = (annotation, *get_args(annotation))
    if bool in types:
        if text.lower() not in _BOOLEANS:
            raise InputError(f"{called} {shown!r} is not allowed: it must be true or false.")
        return {name: _BOOLEANS[text.lower()]}
    try:
        return {name: int(_NO_FRACTION.sub("", text)) if int in types else float(text) if float in types else text}
    except ValueError as error:
        kind = "whole number, such as 25" if int in types else "number, such as 0.5"
        raise InputError(f"{called} {shown!r} is not allowed: it must be a {kind}.") from error


def sweep(options: SubmitOptions, sweeps: Iterable[str]) -> tuple[SubmitOptions, ...]:
    """Return all combinations of the values of several parameters; the last parameter changes fastest.

    Sweeps look like `motion_bucket_id=60,127,180`.

    Raises:
        InputError: a sweep cannot be parsed, or a parameter has values twice.
    """
    columns: list[list[dict[str, Any]]] = []
    swept: set[str] = set()
    for text in sweeps:
        column = _column(text)
        names = {name for values in column for name in values}  # `size` has other fields for `auto` than for a size
        twice = names & (swept | options.given().keys())
        if twice:
            flags = " and ".join(sorted(map(as_flag, twice)))
            raise InputError(f"--sweep {text} gives values to {flags}, which has others; give them in one place.")
        swept |= names
        columns.append(column)
    # Generating one more than allowed is enough to refuse them.
    combinations = itertools.islice(itertools.product(*columns), MAX_VIDEOS + 1)
    return tuple(replace(options, **{k: v for values in chosen for k, v in values.items()}) for chosen in combinations)


def _column(text: str) -> list[dict[str, Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    # A list of formats is one value and contains commas.
    allowed = [field for field in FIELDS if as_key(field) != "format"]
    if not equals or name not in allowed:
        raise InputError(
            f"--sweep {text} is not a sweep; write it as motion_bucket_id=60,127,180, with one of {', '.join(allowed)}."
        )
    return [read_field(name, value, f"--sweep {name}") for value in dict.fromkeys(values.split(","))]


def make_job(
    options: SubmitOptions,
    *,
    model: ExpectedModel | None = None,
    spell: Callable[[str], str] = as_flag,
    variation: int = 0,
    photo_size: tuple[int, int] | None = None,
    **others: Any,
) -> Job:
    """Create a job; the seed is random if none is given, and variation n adds n to a given seed.

    `photo_size`, width and height of the photo if they are known, is for `auto_size`. `spell` returns the name of a
    parameter for errors, `others` are the fields that are not in `options`.

    Raises:
        InputError: a value is not allowed.
    """
    family = options.family_for(model, spell) or DEFAULT_FAMILY
    values = options.given() | others | {"family": family}
    if options.seed is None:
        values["seed"] = secrets.randbits(SEED_BITS)
    elif isinstance(options.seed, int):  # a value of another type from a file is refused by the job
        values["seed"] = options.seed + variation
    is_auto = values.pop("auto_size", None)
    try:
        job = JOBS[family](**values)
        if is_auto and photo_size:
            area = job.width * job.height if job.width and job.height else _OPEN_AREA
            multiple = max(job.side_multiple, _AUTO_MULTIPLE)
            width, height = nearest_size(photo_size, max(area, multiple**2), multiple)
            job = JOBS[family](**values | {"width": width, "height": height})
        return job
    except ValidationError as error:
        raise InputError(_sentence(error, JOBS[family], values, spell)) from error


def _sentence(error: ValidationError, job: type[Job], values: dict[str, Any], spell: Callable[[str], str]) -> str:
    """Describe the first error: the flag, its value and what is allowed."""
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in ("width", "height"):
        width, height = (values.get(side, job.model_fields[side].default) for side in ("width", "height"))
        multiple, hint = job.side_multiple, ""
        if isinstance(width, int) and isinstance(height, int):
            hint = f"; the nearest such size is {nearest_side(width, multiple)}x{nearest_side(height, multiple)}"
        return (
            f"{spell('size')} {_side(width)}x{_side(height)} is not allowed: both sides must be multiples of "
            f"{multiple} from {multiple} to {MAX_SIDE}{hint}."
        )
    allowed = str(first["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if not field:  # a rule about several parameters, which names them itself
        for name in job.model_fields:
            allowed = allowed.replace(name, spell(name))
        return f"{allowed}; change one of them."
    if first["type"] == "string_too_long":
        allowed = f"at most {first['ctx']['max_length']:,} characters, and has {len(first['input']):,}"
    if first["type"] == "string_unicode":
        allowed = "valid text, in the encoding of the terminal"
    value = first["input"]
    # Quotes show that the value is text, such as "7".
    shown = repr(value) if isinstance(value, str) and first["type"].endswith("_type") else value
    return f"{spell(field)} {_shorten(shown)} is not allowed: it must be {allowed}."


def _side(pixels: object) -> str:
    return "default" if pixels is None else _shorten(pixels)


def _shorten(value: object) -> str:
    """Format a value from a foreign file for a sentence."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def nearest_side(pixels: int, multiple: int) -> int:
    """Return the allowed side of a video that is nearest to `pixels`."""
    return round(min(max(pixels, multiple), MAX_SIDE) / multiple) * multiple
