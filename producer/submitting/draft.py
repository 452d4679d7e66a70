"""A draft: the parameters of a video as far as somebody gives them. All fronts read theirs by `read_draft`."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.models.known_model import Expected
from svdq.pipeline.video_parameters import SPEEDUP, LoraChoice
from svdq.producer.job import JOBS, NAMING, VIDEO_FIELDS
from svdq.producer.submitting.parameters import FIELD_OF, FIELDS, MAX_VIDEOS, as_flag, as_key, shorten

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})")
_LORAS = re.compile(r"\s*[;\n]\s*")  # what separates LoRAs in a text
_SPEEDUP = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)[xX]")  # a speedup, such as 1.5x
_NO_FRACTION = re.compile(r"(?<=\d)\.0+$")  # the end of a whole number as pandas and spreadsheets write it: 14.0


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Parameters of a video that are asked for, by the names of its job's fields; None: the default.

    The job refuses values that are not allowed.
    """

    family: str | None = None  # None: the other parameters, or the model, decide it
    model: str | None = None
    frames: int | None = None
    steps: int | None = None
    width: int | None = None
    height: int | None = None
    auto_size: bool | None = None  # for the shape of each photo, with as many pixels as given or by default
    fps: int | None = None
    seed: int | None = None  # None: a random one for each video
    decode_chunk_size: int | None = None
    formats: Sequence[str] | None = None
    fit: str | None = None
    interpolate: int | None = None
    boomerang: bool | None = None
    mark: bool | None = None
    upscale: str | None = None
    loras: Sequence[LoraChoice | str] | None = None  # texts are parsed
    # Parameters of families with prompts, and of single families.
    prompt: str | None = None
    negative_prompt: str | None = None
    loop: bool | None = None
    last_image: str | None = None  # a storage key, which `Photo.last` replaces
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    step_cache: float | str | None = None  # a text is a speedup, such as 1.5x
    motion_bucket_id: int | None = None
    noise_aug_strength: float | None = None
    min_guidance_scale: float | None = None
    max_guidance_scale: float | None = None
    stages: int | None = None
    audio_guidance_scale: float | None = None
    stg_scale: float | None = None
    modality_scale: float | None = None
    guidance_rescale: float | None = None
    sound: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loras, list | tuple):
            object.__setattr__(self, "loras", choices_of(self.loras))
        if isinstance(self.formats, list):  # a draft can be a key
            object.__setattr__(self, "formats", tuple(self.formats))

    def given(self) -> dict[str, Any]:
        """Return the parameters that are given."""
        values = ((name, getattr(self, name)) for name in (*VIDEO_FIELDS, "last_image", "auto_size"))
        return {name: value for name, value in values if value is not None}

    def overridden(self, other: "Draft") -> "Draft":
        """Return it with the parameters of a more specific place, whose size replaces `auto`."""
        auto = self.auto_size if other.width is None and other.height is None else None
        return replace(self, **{"auto_size": auto} | other.given())

    def with_defaults_from(self, job: Mapping[str, Any]) -> "Draft":
        """Fill the parameters that were not given from another job's."""
        recorded = {"family": DEFAULT_FAMILY} | {
            name: _of_json(name, value)
            for name, value in job.items()
            if name not in NAMING or (name == "last_image" and not self.loop)
        }
        if unknown := recorded.keys() - {*VIDEO_FIELDS, "last_image"}:
            raise InputError(
                f"The video has parameters that this version does not support ({', '.join(sorted(unknown))}); "
                "update svdq or give all parameters."
            )
        return Draft(**recorded | self.given())

    def family_for(self, expected: Expected, spell: Callable[[str], str] = as_flag) -> str | None:
        """Return the family that all parameters apply to; None: any. Raises InputError, with names of `spell`."""
        family, model = self.family, expected.model
        if family is not None and family not in tuple(JOBS):
            raise InputError(
                f"{spell('family')} {family} is not allowed: it must be one of {', '.join(JOBS)}.", field="family"
            )
        having = {
            field: [name for name, job in JOBS.items() if field in job.model_fields]
            for field in self.given()
            if field != "auto_size"
        }
        fitting = [name for name in JOBS if all(name in names for names in having.values())]
        chosen = family or (model.family.name if model is not None else None)
        if chosen in fitting:
            return chosen
        wrong = next((field for field, names in having.items() if chosen not in names), "")
        if family is not None:
            raise InputError(
                f"{spell(wrong)} does not apply to {PARAMETERS[family].title} ({spell('family')} {family}), only to "
                f"{_titles(having[wrong])}; leave out one of the two.",
                field=wrong,
            )
        if model is not None and model.is_configured:
            raise InputError(
                f"{spell(wrong)} does not apply to the configured model {model.name}, which is "
                f"{model.family.parameters.title}; leave it out, or give {spell('family')} {having[wrong][0]} if the "
                "workers have such a model.",
                field=wrong,
            )
        if not fitting:
            pairs = itertools.combinations(having, 2)
            one, other = next((one, other) for one, other in pairs if not {*having[one]} & {*having[other]})
            raise InputError(
                f"{spell(one)} applies only to {_titles(having[one])} and {spell(other)} only to "
                f"{_titles(having[other])}; leave out one of the two.",
                field=one,
            )
        if len(fitting) == len(JOBS):
            return None
        return next((name for name in fitting if name in expected.families), fitting[0])


if not TYPE_CHECKING and (_others := [name for name in VIDEO_FIELDS if not hasattr(Draft, name)]):
    # Of families that are not in svdq itself.
    Draft = make_dataclass("Draft", [(name, Any, None) for name in _others], bases=(Draft,), frozen=True, kw_only=True)
SubmitOptions = Draft  # its name in the Python API


def choices_of(loras: Iterable[LoraChoice | str] | None) -> tuple[LoraChoice, ...]:
    """Return LoRAs, those that are texts parsed; raises ValueError."""
    parsed = (LoraChoice.parse(each) if isinstance(each, str) else (each,) for each in loras or ())
    return tuple(itertools.chain.from_iterable(parsed))


def _of_json(name: str, value: Any) -> Any:
    """Return a recorded value as it was: JSON has no tuples."""
    if name == "loras":
        try:
            return tuple(map(LoraChoice.model_validate, value))
        except (TypeError, ValueError) as error:  # anyone may have written it
            raise InputError(f"The LoRAs of the video, {shorten(value)}, cannot be read; give them.") from error
    return tuple(value) if isinstance(value, list) else value


def _titles(families: Iterable[str]) -> str:
    return " and ".join(PARAMETERS[name].title for name in families)


def read_draft(given: Mapping[str, Any], spell: Callable[[str], str] = as_key) -> Draft:
    """Read parameters by their names, as texts or values.

    Names are `FIELDS` and `auto_size`; None counts as not given. `size` is width and height, such as 576x320,
    or `auto`, or `auto:576x320`. Raises InputError if a value is not of the parameter's type, or contradicts another;
    `spell` returns the names for it.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        values = {} if value is None else _read(name, as_text(name, value, spell(name)).strip(), spell(name))
        if any(field in found and found[field] != each for field, each in values.items()):
            raise InputError(f"{spell(name)} contradicts another parameter; leave one of them out.", field=name)
        found |= values
    return Draft(**found)


def read_then(value: object, called: str) -> tuple[str, ...]:
    """Read the prompts of the further links of a chain: a list, or the lines of a text; raises InputError."""
    prompts = value.split("\n") if isinstance(value, str) else value
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        shown = shorten(json.dumps(value, default=str))
        raise InputError(f"{called} {shown} is not allowed: it must be a prompt, or a list of prompts.", field="then")
    return tuple(" ".join(prompt.split()) for prompt in prompts)


def as_text(name: str, value: Any, called: str) -> str:
    """Convert a value of JSON or TOML to the text of a form or a csv file; InputError if it is not a single value."""
    if isinstance(value, list | tuple) and name in ("format", "formats"):
        return " ".join(map(str, value))
    if isinstance(value, list | tuple) and name in ("lora", "loras") and not any(isinstance(v, dict) for v in value):
        return "\n".join(map(str, value))
    if isinstance(value, list | dict) or (isinstance(value, bool) and bool not in _types(name)):
        shown = shorten(json.dumps(value, default=str))
        raise InputError(f"{called} {shown} is not allowed: it must be a single value.", field=name)
    return str(value)


def _types(name: str) -> tuple[Any, ...]:
    annotation = bool if name == "auto_size" else FIELD_OF[name].annotation if name in FIELD_OF else str
    return (annotation, *get_args(annotation))


def _read(name: str, text: str, called: str) -> dict[str, Any]:
    if name == "size":
        return _read_size(text, called)
    if name in ("format", "formats"):  # a repeated one counts once
        return {"formats": tuple(dict.fromkeys(text.replace(",", " ").split()))}
    if name in ("lora", "loras"):
        return {"loras": _read_loras(text, called)}
    if name in FIELD_OF and FIELD_OF[name].json_schema_extra == SPEEDUP and (speedup := _SPEEDUP.fullmatch(text)):
        return {name: f"{speedup[1]}x"}
    shown, types = shorten(text), _types(name)
    if bool in types:
        if text.lower() not in _BOOLEANS:
            raise InputError(f"{called} {shown!r} is not allowed: it must be true or false.", field=name)
        return {name: _BOOLEANS[text.lower()]}
    try:
        return {name: int(_NO_FRACTION.sub("", text)) if int in types else float(text) if float in types else text}
    except ValueError as error:
        kind = "whole number, such as 25" if int in types else "number, such as 0.5"
        kind += ", or a speedup, such as 1.5x" * (name in FIELD_OF and FIELD_OF[name].json_schema_extra == SPEEDUP)
        raise InputError(f"{called} {shown!r} is not allowed: it must be a {kind}.", field=name) from error


def _read_size(text: str, called: str) -> dict[str, Any]:
    auto, colon, of_area = text.lower().partition(":")
    of_photo = {"auto_size": True} if auto == "auto" else {}
    if of_photo and not colon:
        return of_photo
    match = _SIZE.fullmatch(of_area if of_photo else text)
    if match is None:
        raise InputError(
            f"{called} {shorten(text)} is not a size; write width and height in pixels, such as 1024x576, or auto.",
            field="size",
        )
    return {"width": int(match[1]), "height": int(match[2]), **of_photo}


def _read_loras(text: str, called: str) -> tuple[LoraChoice, ...]:
    try:
        return tuple(each for one in _LORAS.split(text) if one for each in LoraChoice.parse(one))
    except ValueError as error:
        raise InputError(
            f"{called} {shorten(text)!r} is not a LoRA: write it as NAME:STRENGTH with a strength from -10 to 10, such "
            "as style:0.8, or for two experts high=NAME,low=NAME:STRENGTH.",
            field="loras",
        ) from error


def sweep(draft: Draft, sweeps: Iterable[str]) -> tuple[Draft, ...]:
    """Return all combinations of values such as `motion_bucket_id=60,127,180`; the last one changes fastest."""
    columns: list[list[dict[str, Any]]] = []
    taken = set(draft.given())
    for text in sweeps:
        column = _column(text)
        if column[0].keys() == {"strength"}:
            columns.append([{"loras": _of_strength(choices_of(draft.loras), text, **each)} for each in column])
            continue
        names = {name for values in column for name in values}  # `size` has other fields for `auto` than for a size
        if names & taken:
            flags = " and ".join(sorted(map(as_flag, names & taken)))
            raise InputError(f"--sweep {text} gives values to {flags}, which has others; give them in one place.")
        taken |= names
        columns.append(column)
    # One more than allowed is enough to refuse them.
    combinations = itertools.islice(itertools.product(*columns), MAX_VIDEOS + 1)
    return tuple(replace(draft, **{k: v for values in chosen for k, v in values.items()}) for chosen in combinations)


def _of_strength(loras: Sequence[LoraChoice], text: str, strength: float) -> tuple[LoraChoice, ...]:
    if not loras:
        raise InputError(f"--sweep {text} needs a LoRA whose strength it changes; give it with --lora.")
    return tuple(each.model_copy(update={"strength": strength}) for each in loras)


def _column(text: str) -> list[dict[str, Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    # A list of formats is one value and contains commas.
    allowed = [field for field in FIELDS if as_key(field) != "format"]
    if not equals or name not in allowed:
        raise InputError(
            f"--sweep {text} is not a sweep; write it as motion_bucket_id=60,127,180, with one of {', '.join(allowed)}."
        )
    distinct = dict.fromkeys(values.split(","))
    if name in ("lora", "loras"):
        try:
            return [
                {"strength": LoraChoice.model_validate({"name": name, "strength": value}).strength}
                for value in distinct
            ]
        except ValueError as error:
            raise InputError(f"--sweep {text} must have strengths from -10 to 10, such as lora=0.6,0.8,1.0.") from error
    return [read_draft({name: value}, lambda name: f"--sweep {name}").given() for value in distinct]
