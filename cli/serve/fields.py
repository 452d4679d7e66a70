"""The fields of a request: from the names and texts of `/v1/videos` to what is to be made of the photo."""

import base64
import binascii
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from svdq.cli.serve.errors import ApiError
from svdq.pipeline.errors import InputError
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.submitting.family import WITH_PROMPTS, ConfiguredModel, choose_family
from svdq.producer.submitting.job_spec import JobSpec, read_folder
from svdq.producer.submitting.options import SubmitOptions, as_key, as_text, read_field
from svdq.producer.timeparse import parse_future

#: The API's names for parameters that svdq calls otherwise.
RENAMED = {"num_frames": "frames", "num_inference_steps": "steps"}
#: Texts for families that take them; of others, they are recorded.
PROMPTS = ("prompt", "negative_prompt")
#: Characters of a prompt.
MAX_PROMPT = 5000
#: Frames and frames a second of each family's videos, where they are left to the model.
USUAL = {"svd": (25, 7), "wan": (81, 16)}
#: The photo in a JSON body or as a field, and the field with its data URL where it is an object.
PHOTO = "input_reference"
_PHOTO_URL = "image_url"
#: Further parameters in one object; the openai client flattens it to `extra_params[name]`.
EXTRA = "extra_params"
#: Fields that are no parameters of a video, or depend on the family.
_OWN = (*PROMPTS, "model", "seconds", "guidance_scale", "priority", "name", "output", "at")
_PLAIN = tuple(name for name in (*VIDEO_FIELDS, "format") if name not in (*RENAMED.values(), *_OWN))
FIELDS = tuple(dict.fromkeys((*_OWN, "size", *RENAMED, *_PLAIN)))
#: Spellings of truth that mean that nothing was given.
_NOTHING = ("", None)


@dataclass(frozen=True, kw_only=True)
class VideoRequest:
    """What a request asks for."""

    spec: JobSpec
    #: The model that is to make the video; "" for whichever runs.
    model: str = ""
    #: The data URL of the photo; "" if it was sent as a file.
    photo_url: str = ""


def read_request(
    fields: Iterable[tuple[str, Any]],
    now: datetime,
    model: ConfiguredModel | None = None,
    base: SubmitOptions | None = None,
) -> VideoRequest:
    """Read the fields of a request: names with texts or, of JSON, values.

    Times of day are after `now`, the family is that of the configured `model` unless the request says otherwise, and
    `base` has the parameters that the request does not give.

    Raises:
        ApiError: a field is unknown, is there twice, or has a value that is not allowed.
    """
    given = _flatten(fields)
    photo = given.pop(PHOTO, "")
    texts = {name: _text(name, value) for name, value in given.items() if value not in _NOTHING or name in PROMPTS}
    spelled: list[str] = []

    def spell(field: str) -> str:
        """Spell a parameter as the API does, and record it: an error is about the first that it names."""
        spelled.append(next((name for name, own in RENAMED.items() if own == field), as_key(field)))
        return spelled[-1]

    param = ""
    try:
        plain = _plain_options(texts)
        family = choose_family(
            [name for name in plain if name in VIDEO_FIELDS and name != "family"],
            plain.get("family") or (base.family if base is not None else None),
            model,
            spell,
        )
        options = _with_family(plain, texts, family, {} if base is None else base.given())
        if base is not None:
            options = replace(base, **options.given())
        param = "output"
        folder = read_folder(texts.get("output", ""))
        param = "at"
        at = parse_future(texts["at"], "at", now) if "at" in texts else None
        spec = JobSpec(
            options=(options,),
            model=model,
            priority=texts.get("priority", "default"),
            name=texts.get("name"),
            folder=folder,
            at=at,
            notes=tuple((name, texts[name]) for name in PROMPTS if name in texts and family not in WITH_PROMPTS),
        )
        param = ""
        spec.check(spell=spell)
    except InputError as error:
        message = str(error)
        if not param:
            named = (name for name in (*spelled, "priority", "name") if name in message)
            param = next(named, "")
        raise ApiError(400, message, param=param or None) from error
    return VideoRequest(spec=spec, model=texts.get("model", ""), photo_url=photo_url(photo))


def _flatten(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Take the parameters out of `extra_params`, which is an object, its JSON, or names with brackets."""
    given: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if name not in (*FIELDS, PHOTO):
            raise ApiError(
                400,
                f"There is no parameter {name[:80]!a}; the parameters are {', '.join(FIELDS)}.",
                param=name[:80] if name.isascii() else None,
                code="unknown_parameter",
            )
        if name in given and not (isinstance(given[name], list) and name in ("format", "formats")):
            raise ApiError(400, f"The parameter {name} is given twice; give it once.", param=name, code="duplicate")
        given[name] = [*given[name], *value] if name in given else value

    for key, value in fields:
        name = key.removesuffix("[]")
        if name.startswith(f"{EXTRA}[") and name.endswith("]"):
            name = name[len(EXTRA) + 1 : -1]
        if name == EXTRA:
            for inner, each in _extra(value).items():
                add(inner, each)
        elif name in (f"{PHOTO}[{_PHOTO_URL}]", f"{PHOTO}[file_id]"):
            add(PHOTO, {name[len(PHOTO) + 1 : -1]: value})
        elif name in ("format", "formats"):
            if value is not None:  # in a form, repeated for each item
                add(name, value if isinstance(value, list) else [value])
        else:
            add(name, value)
    return given


def _extra(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{EXTRA} is not JSON ({error}).", param=EXTRA) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{EXTRA} must be an object of names and values.", param=EXTRA)
    return value


def _text(name: str, value: Any) -> str:
    """Convert a value to the text that a form would have."""
    try:
        text = as_text(name, value)
    except InputError as error:
        raise _bad(name, str(error)) from error
    if not all(char < "\ud800" or char > "\udfff" for char in text):  # JSON can escape half a character
        raise _bad(name, f"{name} has a character that is no Unicode character; remove it.")
    if name in PROMPTS:
        if len(text) > MAX_PROMPT:
            raise _bad(name, f"{name} has {len(text):,} characters; {MAX_PROMPT:,} are allowed.")
        return text
    return text.strip()


def _plain_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `SubmitOptions` that every family reads in the same way."""
    fields: dict[str, Any] = {}
    for name, text in texts.items():
        if name in _OWN:
            continue
        try:
            values = read_field(RENAMED.get(name, name), text, name)
        except InputError as error:
            raise _bad(name, str(error)) from error
        if fields.keys() & values.keys():
            raise _bad(name, f"{name} repeats the value of another parameter; leave one of them out.")
        fields |= values
    return fields


def _with_family(
    plain: Mapping[str, Any], texts: Mapping[str, str], family: str, base: Mapping[str, Any]
) -> SubmitOptions:
    """Add what depends on the family: prompts, guidance, and frames from seconds; `base` as for `read_request`."""
    fields = {**plain, "family": family}
    defaults = {**{name: field.default for name, field in JOBS[family].model_fields.items()}, **base}
    if family in WITH_PROMPTS:
        fields |= {name: texts[name] for name in PROMPTS if name in texts}
    if "guidance_scale" in texts:
        scale = _number("guidance_scale", texts["guidance_scale"])
        if "guidance_scale" in defaults:
            fields["guidance_scale"] = scale
        elif "max_guidance_scale" in fields:
            raise _bad("guidance_scale", "guidance_scale and max_guidance_scale are the same; leave one of them out.")
        else:
            fields["max_guidance_scale"] = scale
            if scale < defaults["min_guidance_scale"]:
                fields.setdefault("min_guidance_scale", scale)
    if "seconds" in texts and "frames" not in fields:
        seconds, step = _number("seconds", texts["seconds"]), JOBS[family].frame_step
        # Where the family leaves the pace to the model, it is fixed here, so that the length is right.
        fps = fields.get("fps", defaults["fps"]) or fields.setdefault("fps", USUAL[family][1])
        frames = seconds * min(max(fps, 1), 1e6)  # an fps that is not allowed is refused below
        if not 0 < frames < 1e6:
            rule = "more than 0" if frames <= 0 else "shorter; videos have 1,024 frames at most"
            raise _bad("seconds", f"seconds {texts['seconds'][:80]} is not allowed: it must be {rule}.")
        fields["frames"] = max(0, round((frames - 1) / step)) * step + 1
    return SubmitOptions(**fields)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _bad(name, f"{name} {text[:80]!r} is not allowed: it must be a number, such as 3.")
    return number


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)


def photo_url(value: Any) -> str:
    """Return a data URL, as a text or in an object; an address of a photo is refused, not fetched."""
    if value in _NOTHING:
        return ""
    if isinstance(value, dict):
        if set(value) != {_PHOTO_URL}:
            raise _bad(PHOTO, f'{PHOTO} must be a file, a data URL, or {{"{_PHOTO_URL}": "data:…"}}.')
        value = value[_PHOTO_URL]
    if not isinstance(value, str) or not value.startswith("data:"):
        raise _bad(PHOTO, f"{PHOTO} must be a file or a data URL (data:image/jpeg;base64,…); nothing is fetched.")
    return value


def decode_data_url(url: str) -> bytes:
    """Decode the bytes of a data URL.

    Raises:
        ApiError: it is not base64.
    """
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not begin with data:…;base64,")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(PHOTO, f"The data URL in {PHOTO} cannot be decoded ({error}).") from error
