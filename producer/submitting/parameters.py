"""Reads the parameters of a video from texts or values, by the fields of each family's `Job`."""

import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer.job import JOBS, NAMING, VIDEO_FIELDS

SEED_BITS = 32  # number of bits of random seeds: short enough to type again
MAX_VIDEOS = 10_000  # largest number of videos of one photo in a submission
#: The field of each parameter; of one that several families have, the first.
FIELD_OF: Mapping[str, FieldInfo] = {
    name: field for job in reversed(tuple(JOBS.values())) for name, field in job.model_fields.items()
}
FIELDS = (*VIDEO_FIELDS, "size", "format", "lora")
_OPTIONS = (*VIDEO_FIELDS, "last_image", "auto_size")
WITH_PROMPTS = tuple(name for name, job in JOBS.items() if "prompt" in job.model_fields)

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})")
_LORAS = re.compile(r"\s*[;\n]\s*")  # what separates LoRAs in a text
_SPEEDUP = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)[xX]")  # a step_cache that is chosen by what it saves
_NO_FRACTION = re.compile(r"(?<=\d)\.0+$")  # the end of a whole number as pandas and spreadsheets write it: 14.0


@cache
def rules_of(family: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each parameter of a family's videos, without null."""
    rules = {}
    for name, schema in JOBS[family].model_json_schema()["properties"].items():
        values = [each for each in schema.get("anyOf", ()) if each["type"] != "null"]
        rules[name] = (values[0] if values else {}) | schema
    return rules


def as_key(field: str) -> str:
    """Spell a parameter as a column of a list or a key of svdq.toml."""
    return {"formats": "format", "last_image": "last", "loras": "lora"}.get(field, field)


def as_flag(field: str) -> str:
    """Spell a parameter as on the command line."""
    return f"--{as_key(field).replace('_', '-')}"


class SubmitOptions:
    """Requested parameters of a video, by the names of its job's fields; None, or one that is not given: the default.

    Besides the fields of the jobs of all families there is `auto_size`: for each photo's shape, with as many pixels as
    given or by default. `step_cache` may be a speedup, such as "1.5x". `last_image` is a storage key, which
    `Photo.last` replaces; `seed` is random for each video without one. The job refuses a value that is not allowed.
    """

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - _OPTIONS:
            raise TypeError(f"there is no parameter {min(unknown)!r}; the parameters are {', '.join(_OPTIONS)}")
        self._given = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
        if isinstance(loras := given.get("loras"), list | tuple):  # texts, as on the command line, or choices
            parsed = (LoraChoice.parse(each) if isinstance(each, str) else (each,) for each in loras)
            self._given["loras"] = tuple(itertools.chain.from_iterable(parsed))

    def __getattr__(self, name: str) -> Any:
        if name not in _OPTIONS:
            raise AttributeError(name)
        return self._given.get(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubmitOptions) and self._given == other._given

    def __hash__(self) -> int:
        return hash(tuple(self._given.items()))

    def __repr__(self) -> str:
        return f"SubmitOptions({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    def given(self) -> dict[str, Any]:
        """Return the parameters that were given."""
        return dict(self._given)

    def replaced(self, **values: Any) -> "SubmitOptions":
        """Return them with other values; None takes one back."""
        return SubmitOptions(**self._given | values)

    def overridden(self, values: Mapping[str, Any]) -> "SubmitOptions":
        """Return them with the values of a more specific place, whose size replaces `auto`."""
        auto = {"auto_size": None} if {"width", "height"} & values.keys() else {}
        return self.replaced(**auto | dict(values))

    def with_defaults_from(self, job: dict[str, Any]) -> "SubmitOptions":
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
        return SubmitOptions(**{**recorded, **self.given()})

    def family_for(self, model: KnownModel | None, spell: Callable[[str], str] = as_flag) -> str | None:
        """Return the family that all parameters apply to; None: any. Raises InputError, with names of `spell`."""
        family = self.family
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
        return None if len(fitting) == len(JOBS) else fitting[0]


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


def read_parameters(given: Mapping[str, Any], spell: Callable[[str], str] = as_key) -> dict[str, Any]:
    """Convert parameters by their names, as texts or values, to fields of `SubmitOptions`.

    Names are `FIELDS` and `auto_size`; None counts as not given. `size` is width and height, such as 576x320,
    or `auto`, or `auto:576x320`. The job checks which values are allowed. Raises InputError if a value is not of the
    parameter's type, or contradicts another; `spell` returns the names for it.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        values = {} if value is None else _read(name, as_text(name, value, spell(name)).strip(), spell(name))
        if any(field in found and found[field] != each for field, each in values.items()):
            raise InputError(f"{spell(name)} contradicts another parameter; leave one of them out.", field=name)
        found |= values
    return found


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
    if name == "step_cache" and (speedup := _SPEEDUP.fullmatch(text)):
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
            "as style:0.8, or of two experts high=NAME,low=NAME:STRENGTH.",
            field="loras",
        ) from error


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such column or key, and which is meant, or else which there are."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, 1, 0.7)
    hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(known)}."
    return f"There is no {kind} {shorten(name)!r}; {hint}"


def shorten(value: object) -> str:
    """Format a value from a foreign file for a sentence."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def sweep(options: SubmitOptions, sweeps: Iterable[str]) -> tuple[SubmitOptions, ...]:
    """Return all combinations of values such as `motion_bucket_id=60,127,180`; the last one changes fastest."""
    columns: list[list[dict[str, Any]]] = []
    taken = set(options.given())
    for text in sweeps:
        column = _column(text)
        if column[0].keys() == {"strength"}:
            columns.append([{"loras": _of_strength(options.loras, text, **each)} for each in column])
            continue
        names = {name for values in column for name in values}  # `size` has other fields for `auto` than for a size
        if names & taken:
            flags = " and ".join(sorted(map(as_flag, names & taken)))
            raise InputError(f"--sweep {text} gives values to {flags}, which has others; give them in one place.")
        taken |= names
        columns.append(column)
    # One more than allowed is enough to refuse them.
    combinations = itertools.islice(itertools.product(*columns), MAX_VIDEOS + 1)
    return tuple(options.replaced(**{k: v for values in chosen for k, v in values.items()}) for chosen in combinations)


def _of_strength(loras: Sequence[LoraChoice] | None, text: str, strength: float) -> tuple[LoraChoice, ...]:
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
    return [read_parameters({name: value}, lambda name: f"--sweep {name}") for value in distinct]
