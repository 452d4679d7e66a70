"""Reads the fields of a request to `/v1/videos`, by names of OpenAI's and of other servers, as a `JobSpec`."""

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from svdq.cli.serve.api_errors import ApiError
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.pipeline.video_parameters import MAX_FPS, MAX_FRAMES
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.submitting.draft import Draft, as_text, read_draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import why_default
from svdq.producer.submitting.parameters import WITH_PROMPTS, as_key
from svdq.producer.submitting.photos import nearest_side
from svdq.producer.text import parse_future

RENAMED = {"num_frames": "frames", "num_inference_steps": "steps"}  # the API's other names for parameters
SOUND = ("generate_audio", "generate_sound")  # vLLM-Omni's name, and SGLang's, for the sound of families that have it
PROMPTS = ("prompt", "negative_prompt")  # texts for families that take them; of others, they are recorded
#: Names of the photo: OpenAI's, vLLM-Omni's, and the one of SGLang and FastVideo.
PHOTOS = ("input_reference", "image_reference", "reference_url")
PHOTO = PHOTOS[0]
LAST_PHOTO = "last_reference"  # name of the photo of the last frame
_PHOTO_URL = "image_url"  # the data URL of a photo that is an object
#: Objects with further parameters; OpenAI's clients flatten them to names such as `extra_params[fps]`.
EXTRAS = ("extra_params", "extra_body", "extra_json", "video_params")
MAX_JSON_VALUES = 10_000  # of a body or a field, counted before it is parsed
_MAX_DEPTH = 3  # such objects within each other
_OFF = ("false", "0")
#: Parameters of other servers that svdq has not, with the texts that ask for nothing.
NO_OPS: Mapping[str, tuple[str, ...]] = {
    "n": ("1",),
    "num_outputs_per_prompt": ("1",),
    "quality": ("auto", "default", "standard"),
    "output_quality": ("default",),
    "enable_teacache": _OFF,
    "enable_upscaling": _OFF,
    "upscaling_scale": ("4",),
    "enable_frame_interpolation": _OFF,
    "frame_interpolation_exp": ("1",),
    "frame_interpolation_scale": ("1", "1.0"),
    "true_cfg_scale": ("1", "1.0"),
    "max_sequence_length": ("512",),
    "generator_device": ("cpu",),
    "response_format": ("url",),
}
#: Fields that are no parameters of a video, or depend on the family.
_OWN = (*PROMPTS, *SOUND, "model", "seconds", "guidance_scale", "priority", "name", "output", "keep_location", "at")
_SWITCHES = (*SOUND, "keep_location")
_PLAIN = tuple(name for name in (*VIDEO_FIELDS, "format") if name not in RENAMED.values())
FIELDS = tuple(dict.fromkeys((*_OWN, "size", *RENAMED, *_PLAIN, "lora")))
_OF_LORA = ("name", "local_path", "scale", "int_id")  # keys of vLLM-Omni's object; the last says nothing here
_NULLS = (None, "null", "None")  # nothing: forms have no null, and Python's clients write `None`
_NOTHING = ("", *_NULLS)
_NAMED_SIZES = ((1280, 720), (720, 1280))  # of OpenAI's clients; a model may render only one close by


def model_in(fields: Iterable[tuple[str, Any]]) -> str:
    """Return the model that is to make the video; "" for whichever runs."""
    model = dict(fields).get("model")
    return "" if model in _NOTHING else str(model).strip()


def read_request(
    fields: Iterable[tuple[str, Any]],
    now: datetime,
    expected: Expected = NOT_KNOWN,
    base: Draft | None = None,
) -> JobSpec:
    """Read the fields of a request, names with texts or, of JSON, values; but for `model_in`, which the caller checks.

    Times are after `now`, by the clock of Redis; `base` has the parameters that the request does not give. Raises
    ApiError.
    """
    given = _known(fields)

    def spell(field: str) -> str:
        if field in ("min_guidance_scale", "max_guidance_scale") and field not in given:
            return "guidance_scale" if "guidance_scale" in given else field
        names = RENAMED | {LAST_PHOTO: "last_image"} | {name: "sound" for name in SOUND if name in given}
        return next((name for name, own in names.items() if own == field), as_key(field))

    try:
        return _read(given, now, expected, base or Draft(), spell)
    except InputError as error:
        raise ApiError(400, str(error), param=spell(error.field) if error.field else None) from error


def _read(
    given: Mapping[str, Any],
    now: datetime,
    expected: Expected,
    base: Draft,
    spell: Callable[[str], str],
) -> JobSpec:
    texts = {name: as_text("sound" if name in _SWITCHES else name, value, name) for name, value in given.items()}
    own = {name: text.strip() for name, text in texts.items() if name in _OWN}
    prompts: dict[str, Any] = {name: text for name, text in texts.items() if name in PROMPTS}
    others = {RENAMED.get(name, name): text for name, text in texts.items() if name not in _OWN}
    plain = read_draft(others, spell).given()
    sound = [_is_on(name, own[name]) for name in SOUND if name in own]
    if any(sound):
        plain["sound"] = True
    asked = Draft(**({"family": base.family, "last_image": base.last_image} | plain))
    family = asked.family_for(expected, spell)
    if family is None and any(text.strip() for text in prompts.values()):
        family = next((name for name in WITH_PROMPTS if name in expected.families), None)
    notices = [why_default(expected, spell)] if family is None else []
    family = family or DEFAULT_FAMILY
    notices.append(_take_nearest_size(plain, JOBS[family].side_multiple))
    notes: tuple[tuple[str, str], ...] = ()
    if sound and not any(sound) and "sound" in JOBS[family].model_fields:
        plain["sound"] = False
    if family in WITH_PROMPTS:
        plain |= prompts
    else:  # recorded, and so as clean as prompts that are used
        JobSpec(drafts=(Draft(family=WITH_PROMPTS[0], **prompts),)).check(spell)
        notes = tuple(prompts.items())
    _add_guidance_and_frames(plain, own, family, base)
    spec = JobSpec(
        drafts=(base.overridden(Draft(**plain | {"family": family})),),
        expected=expected,
        priority=own.get("priority", "default"),
        name=own.get("name"),
        at=_time(own["at"], now) if "at" in own else None,
        notes=notes,
        keep_location="keep_location" in own and _is_on("keep_location", own["keep_location"]),
        notice=" ".join(filter(None, notices)),
    ).with_output(own.get("output", ""))
    spec.check(spell=spell)
    return spec


def flatten(fields: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], str, str]:
    """Take parameters out of the objects of `EXTRAS`, which may be JSON or names with brackets.

    Returns the other parameters, and the data URLs of the photo and of the last frame, or ""; raises ApiError.
    """
    found: list[tuple[str, Any]] = []
    urls: dict[str, set[str]] = {PHOTO: {""}, LAST_PHOTO: {""}}

    def add(key: str, value: Any, depth: int) -> None:
        name, _, inner = key.removesuffix("[]").partition("[")
        item = {inner.removesuffix("]"): value} if inner else value
        if name in EXTRAS and depth < _MAX_DEPTH:
            for each in _object(name, item).items():
                add(*each, depth + 1)
        elif name in (*PHOTOS, LAST_PHOTO):
            photos = _parsed(name, item)
            found_urls = {_photo_url(name, photo) for photo in (photos if isinstance(photos, list) else [photos])}
            urls[PHOTO if name in PHOTOS else name] |= found_urls
        else:
            found.append((key.removesuffix("[]"), value))

    for field in fields:
        add(*field, 0)
    for name, given in urls.items():
        if len(given) > 2:
            raise two_photos(name)
    return found, "".join(urls[PHOTO]), "".join(urls[LAST_PHOTO])


def _known(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the given parameters by name; raises ApiError if one is unknown, not supported, or has two values."""
    given: dict[str, Any] = {}
    for name, value in fields:
        if name == "user" or value in (_NULLS if name in PROMPTS else _NOTHING):
            continue
        if name in NO_OPS:
            text = value if isinstance(value, str) else json.dumps(value)
            if text.strip().lower() not in NO_OPS[name]:
                allowed = " or ".join(NO_OPS[name])
                raise _bad(name, f"{name} {text[:80]} is not supported: leave it out, or send {allowed}.")
        elif name not in FIELDS:
            message = f"There is no parameter {name[:80]!a}; the parameters are {', '.join((PHOTO, *FIELDS))}."
            param = name[:80] if name.isascii() else None
            raise ApiError(400, message, param=param, code="unknown_parameter")
        elif name in ("lora", "loras"):
            given["loras"] = [*given.get("loras", ()), *_loras(name, value)]
        elif name in ("format", "formats"):  # in a form, repeated for each item
            given[name] = [*given.get(name, ()), *(value if isinstance(value, list) else [value])]
        elif str(given.setdefault(name, value)) != str(value):
            raise ApiError(400, f"The parameter {name} is given twice; give it once.", param=name, code="duplicate")
    return given


def _loras(name: str, value: Any) -> list[str]:
    """Return LoRAs as they are written on the command line, from texts or vLLM-Omni's objects, or lists of these."""
    value = _parsed(name, value)
    found = []
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and each.keys() <= {*_OF_LORA} and (each.get("local_path") or each.get("name")):
            scale, path = each.get("scale"), each.get("local_path")
            called = PurePosixPath(str(path)).name if path else str(each["name"])
            found.append(called if scale is None else f"{called}:{scale}")
        elif isinstance(each, str):
            found.append(each)
        else:
            raise _bad(
                name, f'{name} must be a text such as "style:0.8", {{"name": "style", "scale": 0.8}}, or a list.'
            )
    return found


def _object(name: str, value: Any) -> Mapping[str, Any]:
    value = _parsed(name, value)
    if isinstance(value, dict):
        return value
    if value not in _NOTHING:
        raise _bad(name, f"{name} must be an object of names and values.")
    return {}


def _parsed(name: str, value: Any) -> Any:
    """Parse a text that is an object or a list in JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return parse_json(value.encode(errors="surrogatepass"))
    except ValueError as error:
        raise _bad(name, f"{name} is not JSON ({error}).") from error


def parse_json(data: bytes) -> Any:
    """Parse JSON; raises ValueError also for too many values, which take thirty times the memory of their text."""
    check_num_values(data)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("its values are too deep in each other") from error


def check_num_values(data: bytes) -> None:
    """Raise ValueError for JSON with too many values."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_JSON_VALUES:  # none of which is in a photo as a data URL
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")


def _take_nearest_size(fields: dict[str, Any], multiple: int) -> str:
    """Change a named size to the nearest one whose sides are multiples; return a notice, or ""."""
    asked = fields.get("width"), fields.get("height")
    if asked not in _NAMED_SIZES or "auto_size" in fields:
        return ""
    width, height = (nearest_side(side, multiple) for side in asked)
    if (width, height) == asked:
        return ""
    fields |= {"width": width, "height": height}
    return f"The size is {width}x{height}, the nearest to {asked[0]}x{asked[1]} that this family of models renders."


def _add_guidance_and_frames(fields: dict[str, Any], own: Mapping[str, str], family: str, base: Draft) -> None:
    """Add guidance_scale by its names in the family, and frames for seconds."""
    defaults = {name: field.default for name, field in JOBS[family].model_fields.items()} | base.given()
    if "guidance_scale" in own:
        scale = _number("guidance_scale", own["guidance_scale"])
        if "guidance_scale" in JOBS[family].model_fields:
            fields["guidance_scale"] = scale
        elif "max_guidance_scale" in fields:
            raise InputError(
                "guidance_scale and max_guidance_scale are the same; leave one of them out.", field="guidance_scale"
            )
        else:
            fields["max_guidance_scale"] = scale
            if scale < defaults["min_guidance_scale"]:
                fields.setdefault("min_guidance_scale", scale)
    if "seconds" in own and "frames" not in fields:
        seconds, step = _number("seconds", own["seconds"]), JOBS[family].frame_step
        # Where the family leaves the pace to the model, it is fixed here, so that the length is right.
        fps = fields.get("fps", defaults["fps"]) or fields.setdefault("fps", JOBS[family].usual[1])
        frames = min(seconds * min(max(fps, 1), MAX_FPS), 1e6)  # an fps that is not allowed is refused later
        fields["frames"] = max(0, round((frames - 1) / step)) * step + 1
        if seconds <= 0 or fields["frames"] > MAX_FRAMES:
            rule = "more than 0" if seconds <= 0 else f"shorter; videos have {MAX_FRAMES:,} frames at most"
            raise InputError(f"seconds {own['seconds'][:80]} is not allowed: it must be {rule}.", field="seconds")


def _is_on(name: str, text: str) -> bool:
    return bool(read_draft({"sound": text}, lambda _: name).sound)


def _time(text: str, now: datetime) -> datetime:
    try:
        return parse_future(text, "at", now)
    except InputError as error:
        raise InputError(str(error), field="at") from error


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} {text[:80]!r} is not allowed: it must be a number, such as 3.", field=name)
    return number


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)


def two_photos(name: str = PHOTO) -> ApiError:
    """Create the error for a request with two photos for a frame."""
    message = f"There are two photos; send one as {PHOTO}, and the last frame as {LAST_PHOTO}."
    return ApiError(400, message, param=name, code="duplicate")


def _photo_url(name: str, value: Any) -> str:
    """Return the data URL of a photo, "" for none; an address of a photo is refused, not fetched."""
    if isinstance(value, dict):
        if any(each not in _NOTHING for key, each in value.items() if key != _PHOTO_URL):
            raise _bad(name, f'{name} must be a file, a data URL, or {{"{_PHOTO_URL}": "data:…"}}.')
        value = value.get(_PHOTO_URL)
    if value in _NOTHING:
        return ""
    if not isinstance(value, str) or not value.startswith("data:"):
        raise _bad(name, f"{name} must be a file or a data URL (data:image/jpeg;base64,…); nothing is fetched.")
    return value


def decode_data_url(url: str, name: str = PHOTO) -> bytes:
    """Decode the bytes of the data URL in a field; raises ApiError if it is not base64."""
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not begin with data:…;base64,")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(name, f"The data URL in {name} cannot be decoded ({error}).") from error
