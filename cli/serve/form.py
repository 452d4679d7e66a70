"""The form of the page: its fields, made from the parameter model, and the jobs that it asks for."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.pipeline.models.model_name import has_weights
from svdq.pipeline.models.names.model_names import family_of_model
from svdq.producer.job import JOBS, VIDEO_FIELDS, Job
from svdq.producer.submitting.draft import Draft, read_draft, read_then
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import FIELD_OF, rules_of
from svdq.producer.text import parse_future

#: Shown in empty fields.
PLACEHOLDERS: Mapping[str, str] = {"seed": "random", "interpolate": "off", "upscale": "off", "loras": "none"}
#: Shown first, with the fields that say so themselves; the others are below "More settings".
FIRST = ("prompt", "shape", "width", "height", "frames")
NUM_PLAIN_WORDS = 3  # descriptions of at most this many words say no more than the label
#: Fields besides the parameters of a video.
OWN_FIELDS = ("variations", "priority", "folder", "at", "then", "keep_location")


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One parameter in the form."""

    name: str
    label: str
    kind: str  # `number`, `text`, `choice`, `checks`, or `known`: a text with suggestions
    default: str  # as text; formats are separated by spaces; "" leaves it to the model
    hint: str = ""  # what it means; "" where the label says it
    placeholder: str = ""  # shown while there is no value
    #: Limits of a number and its step; `high` is the longest length of a text.
    low: str = ""
    high: str = ""
    step: str = "any"
    choices: tuple[tuple[str, str], ...] = ()  # values, each with its words
    is_main: bool = False  # whether it is shown at first


def fields(family: str, defaults: Mapping[str, Any], loras: Collection[str] = ()) -> list[FormField]:
    """Return the fields of all parameters of a family's videos, the main ones first; with a model file's defaults.

    `loras` are the names of those that can be chosen; without any, there is no field for them.
    """
    rules, job = rules_of(family), JOBS[family]
    rules = {name: rule | ({"default": defaults[name]} if name in defaults else {}) for name, rule in rules.items()}
    found = [
        _field(name, rules[name], job)
        for name in VIDEO_FIELDS
        if name in rules and name not in ("family", "model", "loras")
    ]
    if loras:
        found.append(
            FormField(
                name="loras",
                label=label_of("loras"),
                kind="known",
                default="",
                hint="A name, its strength after a colon; several with semicolons between them.",
                placeholder=PLACEHOLDERS["loras"],
                choices=tuple((name, name) for name in sorted(loras)),
            )
        )
    shapes = (*job.sizes, ("other", "other…"))
    size = "{width}x{height}".format_map(defaults) if {"width", "height"} <= defaults.keys() else "auto"
    shapes = shapes if size in dict(shapes) else ((size, size), *shapes)
    label = "Shape and size"
    found.append(FormField(name="shape", label=label, kind="shape", default=size, choices=shapes, is_main=True))
    return sorted(
        found, key=lambda field: FIRST.index(field.name) if field.name in FIRST else len(FIRST) + (not field.is_main)
    )


def families(running: Mapping[str, str | None], configured: str) -> list[str]:
    """Return the families whose videos can be made now by the models that run, the configured one's first."""
    first = family_of_model(configured) or DEFAULT_FAMILY
    known = dict.fromkeys([family for family in running.values() if family is not None])
    if not known or None in running.values():  # preview and simulated render videos of all families
        known |= dict.fromkeys([first, *(JOBS if not has_weights(configured) else ())])
    return sorted(known, key=lambda family: family != first)


def label_of(name: str) -> str:
    """Return the words for a parameter: the title of its field, else its name without underscores."""
    title = FIELD_OF[name].title if name in FIELD_OF else None
    return title or name.replace("_", " ").capitalize()


def _field(name: str, rules: Mapping[str, Any], job: type[Job]) -> FormField:
    """Describe a parameter by its JSON schema."""
    default, choices = rules.get("default"), rules.get("enum", ())
    kind, step = "choice" if choices else "text", str(rules.get("multipleOf", "any"))
    low, high = rules.get("minimum"), rules.get("maximum", rules.get("maxLength"))
    match rules["type"]:
        case "integer":
            kind, step = "number", str(job.frame_step if name == "frames" else rules.get("multipleOf", 1))
        case "number" if rules.get("speedup"):  # which may be 1.5x
            low = high = None
        case "number":
            kind = "number"
        case "array":
            has_sound = "sound" in job.model_fields
            choices = [each for each in rules["items"]["enum"] if each != "wav" or has_sound]
            kind, default = "checks", " ".join(default or ())
        case "boolean":
            kind, choices, default = "choice", ("no", "yes"), "yes" if default else "no"
    hint = rules.get("description", "")
    return FormField(
        name=name,
        label=label_of(name),
        hint=hint if len(hint.split()) > NUM_PLAIN_WORDS else "",
        kind=kind,
        default="" if default is None else str(default),
        placeholder=PLACEHOLDERS.get(name, "automatic" if kind == "number" else ""),
        low="" if low is None else f"{low:g}",
        high="" if high is None or high > 1e12 else f"{high:g}",
        step=step,
        is_main=name in FIRST or bool(rules.get("main")),
        choices=tuple((choice, choice) for choice in choices),
    )


def read_spec(
    given: Mapping[str, str], now: datetime, expected: Expected = NOT_KNOWN, *, has_last_photo: bool = False
) -> JobSpec:
    """Read a form, whose missing and empty fields have their defaults or the model's; raises InputError.

    Times are after `now`, by the clock of Redis.
    """
    values = {name: text for name, text in given.items() if text.strip()}
    own = {name: values.pop(name) for name in OWN_FIELDS if name in values}
    spec = JobSpec(
        drafts=(read_changes(values),),
        expected=expected,
        variations=whole_number(own.get("variations", "1"), "Videos of each photo"),
        priority=own.get("priority", "default"),
        at=parse_future(own["at"], "Time", now) if "at" in own else None,
        then=read_then(own["then"].strip(), "Then") if "then" in own else (),
        keep_location="keep_location" in own,
    ).with_output(own.get("folder", ""))
    spec = spec.with_last_photo() if has_last_photo else spec
    spec.check(label_of)
    return spec


def read_changes(given: Mapping[str, str]) -> Draft:
    """Read parameters of a video; raises InputError."""
    if unknown := set(given).difference(VIDEO_FIELDS, ["auto_size", "size"]):
        raise InputError(f"There is no setting {min(unknown)[:80]!r}; load the page again.")
    return read_draft(given, label_of)


def whole_number(text: str, called: str) -> int:
    """Parse a number; raises InputError with its name `called` if it is no whole number."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InputError(f"{called} {text[:80]!r} is not allowed: it must be a whole number, such as 3.")
    return int(text)
