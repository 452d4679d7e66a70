"""The form of the page: the fields of the job model with their defaults, limits and descriptions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from svdq.pipeline.models.names import has_weights
from svdq.pipeline.models.registry import DEFAULT_FAMILY, family_of_model
from svdq.producer.job import JOBS, VIDEO_FIELDS, Job

#: Words for a photographer; other parameters show their name without underscores.
LABELS: Mapping[str, str] = {
    "prompt": "Prompt",
    "negative_prompt": "What to avoid",
    "guidance_scale": "Guidance",
    "guidance_scale_2": "Guidance, later steps",
    "flow_shift": "Noise shift",
    "width": "Width",
    "height": "Height",
    "fps": "Frames a second",
    "motion_bucket_id": "Motion",
    "noise_aug_strength": "Noise",
    "min_guidance_scale": "Guidance, first frame",
    "max_guidance_scale": "Guidance, last frame",
    "auto_size": "Shape",
    "interpolate": "Smooth motion",
    "boomerang": "Forward and back",
    "decode_chunk_size": "Frames decoded at a time",
    "formats": "File type",
    "fit": "Photos of another shape",
    "size": "Size",
}
#: Shown in empty fields that are not left to the model.
PLACEHOLDERS: Mapping[str, str] = {"seed": "random", "interpolate": "off"}
#: Shown first; the others are below "More settings".
MAIN = ("prompt", "width", "height", "auto_size", "frames", "motion_bucket_id", "formats")
#: Descriptions of at most this many words say no more than the label.
NUM_PLAIN_WORDS = 3
#: Limits from here on are shown to nobody.
_ENDLESS = 1e12


@dataclass(frozen=True, kw_only=True)
class Field:
    """One parameter in the form."""

    #: Name of the parameter, its label and what it means.
    name: str
    label: str
    hint: str
    #: `number`, `text`, `choice` or `checks`.
    kind: str
    #: As text; formats are separated by spaces; "" leaves it to the model.
    default: str
    #: Shown while there is no value.
    placeholder: str = ""
    #: Limits of a number and its step; `high` is the longest length of a text.
    low: str = ""
    high: str = ""
    step: str = "any"
    #: Values, each with its words.
    choices: tuple[tuple[str, str], ...] = ()
    #: Whether it is shown at first.
    is_main: bool = False


def fields(family: str) -> list[Field]:
    """Return the fields of all parameters of a family's videos, the main ones first."""
    job = JOBS[family]
    names = [name for name in VIDEO_FIELDS if name in job.model_fields and name != "family"]
    found = [_field(name, job) for name in names]
    found.append(
        Field(
            name="auto_size",
            label=label_of("auto_size"),
            hint="",
            kind="choice",
            default="no",
            choices=(("no", "as set above"), ("yes", "as each photo")),
            is_main=True,
        )
    )
    return sorted(found, key=lambda field: MAIN.index(field.name) if field.is_main else len(MAIN))


def families(models: Iterable[str], configured: str) -> list[str]:
    """Return the families whose videos can be made now, that of the configured model first.

    Args:
        models: that workers run; their families may be unknown on this machine.
        configured: the model of the settings.
    """
    first = family_of_model(configured) or DEFAULT_FAMILY
    running = [family_of_model(model) for model in models]
    known = dict.fromkeys([family for family in running if family is not None])
    if not known or None in running:  # preview and simulated render videos of all families
        known |= dict.fromkeys([first, *(JOBS if not has_weights(configured) else ())])
    return sorted(known, key=lambda family: family != first)


def label_of(name: str) -> str:
    """Return the words for a parameter."""
    return LABELS.get(name) or name.replace("_", " ").capitalize()


def _field(name: str, job: type[Job]) -> Field:
    info = job.model_fields[name]
    kind, choices, number = _kind(info.annotation)
    default = "" if info.is_required() or info.default is None else info.default
    if isinstance(default, tuple):
        default = " ".join(default)
    if isinstance(default, bool):
        default = "yes" if default else "no"
    limits = _limits(info, number)
    if name == "frames":
        limits["step"] = str(job.frame_step)
    hint = info.description or ""
    return Field(
        name=name,
        label=label_of(name),
        hint=hint if len(hint.split()) > NUM_PLAIN_WORDS else "",
        kind=kind,
        default=str(default),
        placeholder=PLACEHOLDERS.get(name, "automatic") if number else "",
        choices=tuple((choice, choice) for choice in choices),
        is_main=name in MAIN,
        **limits,
    )


def _kind(annotation: Any) -> tuple[str, tuple[str, ...], type | None]:
    """Return the kind of a field, its choices, and the type of its number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _kind(next(each for each in arguments if each is not type(None)))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return "choice", arguments, None
    if origin is tuple:
        return "checks", get_args(arguments[0]), None
    if annotation is bool:
        return "choice", ("no", "yes"), None
    return ("number", (), annotation) if annotation in (int, float) else ("text", (), None)


def _limits(info: FieldInfo, number: type | None) -> dict[str, str]:
    rules = _rules(info)
    if number is None:
        return {"high": str(rules.get("max_length", ""))}
    low, high = rules.get("ge"), rules.get("le")
    step = rules.get("multiple_of") or (1 if number is int else "any")
    return {
        "low": "" if low is None else f"{low:g}",
        "high": "" if high is None or high > _ENDLESS else f"{high:g}",
        "step": str(step),
    }


def _rules(info: FieldInfo) -> dict[str, Any]:
    """Read the limits of a field, also those of the members of its union."""
    found: dict[str, Any] = {}
    metadata = list(info.metadata)
    for member in get_args(info.annotation):
        metadata += getattr(member, "__metadata__", ())
    for entry in metadata:
        for rule in getattr(entry, "metadata", None) or [entry]:
            for name in ("ge", "le", "multiple_of", "max_length"):
                if getattr(rule, name, None) is not None:
                    found[name] = getattr(rule, name)
    return found
