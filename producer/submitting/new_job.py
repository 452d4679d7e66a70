"""Makes the job of a draft, or says in a sentence what is not allowed."""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.families import DEFAULT_FAMILY, published_model
from svdq.pipeline.models.known_model import Expected, KnownModel
from svdq.pipeline.video_parameters import MAX_SIDE
from svdq.producer.job import JOBS, Job
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.parameters import SEED_BITS, as_flag, shorten
from svdq.producer.submitting.photos import nearest_side, nearest_size

_AUTO_MULTIPLE = 32  # of sides that are chosen: all models can make such sizes


def known_for(model: KnownModel | None, family: str) -> KnownModel:
    """Return a model if it makes videos of a family, else the published one of the family."""
    return model if model is not None and model.family.name == family else published_model(family)


def seed_of(job_id: str) -> int:
    """Draw the seed of a job: the same for the same submission, also when Redis has forgotten the job."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[: SEED_BITS // 8])


def make_job(
    draft: Draft,
    *,
    model: KnownModel | None = None,
    spell: Callable[[str], str] = as_flag,
    variation: int = 0,
    photo_size: tuple[int, int] | None = None,
    **others: Any,
) -> Job:
    """Create a job; the seed is random if none is given, and variation n adds n to a given seed.

    `photo_size`, in pixels, is for `auto_size`; `others` are the fields that are not in drafts. Raises InputError.
    """
    family = draft.family_for(Expected(model=model), spell) or DEFAULT_FAMILY
    fields = JOBS[family].model_fields
    known = known_for(model, family)
    # Those that may be left open are filled in by the worker.
    defaults = known.facts.get("defaults", {})
    values = {name: value for name, value in defaults.items() if fields[name].default is not None}
    values |= draft.given() | others | {"family": family}
    if draft.seed is None:
        values["seed"] = secrets.randbits(SEED_BITS)
    elif isinstance(draft.seed, int):  # others are refused by the job
        values["seed"] = draft.seed + variation
    is_auto = values.pop("auto_size", None)
    job = valid_job(JOBS[family], values, spell)
    if not is_auto or not photo_size:
        return job
    usual = known.usual
    area = job.width * job.height if job.width and job.height else usual.width * usual.height
    multiple = max(job.side_multiple, _AUTO_MULTIPLE)
    width, height = nearest_size(photo_size, max(area, multiple**2), multiple)
    return valid_job(JOBS[family], values | {"width": width, "height": height}, spell)


def valid_job(
    kind: type[Job], values: Mapping[str, Any], spell: Callable[[str], str] = as_flag, *, field: str = ""
) -> Job:
    """Make a job of its fields; raises InputError about the first value that is not allowed, which is of `field`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = first_error(error)
        # A rule about several parameters names them itself.
        named = (word for word in re.findall(r"\w+", first["msg"]) if word in kind.model_fields)
        own = str(first["loc"][0]) if first["loc"] else next(named, "")
        own = "size" if own in ("width", "height") else own
        raise InputError(_sentence(first, kind, values, spell), field=field or own) from error


def _sentence(first: ErrorDetails, job: type[Job], values: Mapping[str, Any], spell: Callable[[str], str]) -> str:
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in ("width", "height"):
        given = {side: values.get(side, job.model_fields[side].default) for side in ("width", "height")}
        given = {side: value for side, value in given.items() if value is not None}
        sides, called = list(given.values()), "size" if len(given) > 1 else field
        shown = "x".join(map(shorten, sides))
        multiple, hint = job.side_multiple, ""
        if all(isinstance(side, int) for side in sides):
            hint = f"; the nearest such size is {'x'.join(str(nearest_side(side, multiple)) for side in sides)}"
        return (
            f"{spell(called)} {shown} is not allowed: both sides must be multiples of {multiple} from {multiple} to "
            f"{MAX_SIDE}{hint}."
        )
    allowed = first["msg"].removeprefix("Input should be ")
    if not field:  # a rule about several parameters, which names them itself
        allowed = re.sub(r"\w+", lambda word: spell(word[0]) if word[0] in job.model_fields else word[0], allowed)
        return f"{allowed}; change one of them."
    if first["type"] in ("string_too_short", "too_short"):
        allowed = "at least one"
    if first["type"] == "string_too_long":
        allowed = f"at most {first['ctx']['max_length']:,} characters, and has {len(first['input']):,}"
    if first["type"] == "string_unicode":
        allowed = "valid text, in the encoding of the terminal"
    value = first["input"]
    # Quotes show that the value is text, such as "7".
    shown = repr(value) if isinstance(value, str) and (first["type"].endswith("_type") or not value) else value
    return f"{spell(field)} {shorten(shown)} is not allowed: it must be {allowed}."
