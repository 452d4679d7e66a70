"""The form of the page: its fields with their defaults, limits and descriptions, and what it asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY
from svdq.pipeline.models.model_names import family_of_model, has_weights
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.status.estimates import Estimate, Waiting, estimate_all, with_more
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.submitting.job_spec import JobSpec, read_folder
from svdq.producer.submitting.parameters import SubmitOptions, make_job, read_field
from svdq.producer.text import parse_future

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
#: Fields besides the parameters of a video.
OWN_FIELDS = ("variations", "priority", "folder", "at")


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
    schemas = job.model_json_schema()["properties"]
    names = [name for name in VIDEO_FIELDS if name in schemas and name != "family"]
    found = [_field(name, schemas[name], job.frame_step) for name in names]
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


def families(running: Mapping[str, str | None], configured: str) -> list[str]:
    """Return the families whose videos can be made now by the `running_models`, the configured one's first."""
    first = family_of_model(configured) or DEFAULT_FAMILY
    known = dict.fromkeys([family for family in running.values() if family is not None])
    if not known or None in running.values():  # preview and simulated render videos of all families
        known |= dict.fromkeys([first, *(JOBS if not has_weights(configured) else ())])
    return sorted(known, key=lambda family: family != first)


def label_of(name: str) -> str:
    """Return the words for a parameter."""
    return LABELS.get(name) or name.replace("_", " ").capitalize()


def _field(name: str, schema: Mapping[str, Any], frame_step: int) -> Field:
    """Describe a parameter by its JSON schema, or that of its values other than null."""
    options: Sequence[dict[str, Any]] = schema.get("anyOf", ())
    rules = {**next((each for each in options if each["type"] != "null"), {}), **schema}
    default, step = rules.get("default"), rules.get("multipleOf", "any")
    kind, choices = "text", rules.get("enum", ())
    low, high = rules.get("minimum"), rules.get("maximum", rules.get("maxLength"))
    is_number = rules["type"] in ("integer", "number")
    if is_number:
        kind = "number"
        if rules["type"] == "integer":
            step = frame_step if name == "frames" else rules.get("multipleOf", 1)
    elif rules["type"] == "array":
        kind, choices, default = "checks", rules["items"]["enum"], " ".join(default or ())
    elif rules["type"] == "boolean":
        kind, choices, default = "choice", ("no", "yes"), "yes" if default else "no"
    elif choices:
        kind = "choice"
    hint = rules.get("description", "")
    return Field(
        name=name,
        label=label_of(name),
        hint=hint if len(hint.split()) > NUM_PLAIN_WORDS else "",
        kind=kind,
        default="" if default is None else str(default),
        placeholder=PLACEHOLDERS.get(name, "automatic") if is_number else "",
        low="" if low is None else f"{low:g}",
        high="" if high is None or high > _ENDLESS else f"{high:g}",
        step=str(step),
        choices=tuple((choice, choice) for choice in choices),
        is_main=name in MAIN,
    )


def read_spec(given: Mapping[str, str]) -> JobSpec:
    """Read a form; missing fields have their defaults.

    Raises:
        InputError: a field or a value is not allowed.
    """
    values = {name: text for name, text in given.items() if text.strip()}
    at = values.get("at")
    spec = JobSpec(
        options=(read_options({name: text for name, text in values.items() if name not in OWN_FIELDS}),),
        variations=whole_number(values.get("variations", "1"), "Videos of each photo"),
        priority=values.get("priority", "default"),
        folder=read_folder(values.get("folder", "")),
        at=None if at is None else parse_future(at, "Time", datetime.now().astimezone()),
    )
    spec.check(label_of)
    return spec


def read_options(given: Mapping[str, str]) -> SubmitOptions:
    """Read the parameters of a video; raises as `read_spec`."""
    unknown = set(given).difference(VIDEO_FIELDS, ["auto_size"])
    if unknown:
        raise InputError(f"There is no setting {min(unknown)[:80]!r}; load the page again.")
    found: dict[str, Any] = {}
    for name, text in given.items():
        if name == "auto_size":
            found |= {"auto_size": True} if text == "yes" else {}
        else:
            found |= read_field(name, text, label_of(name))
    return SubmitOptions(**found)


def estimate_of(snapshot: Snapshot, spec: JobSpec, num_videos: int, now: datetime) -> Estimate:
    """Estimate when videos that are not queued yet will be done, after all that waits already."""
    parameters = make_job(spec.options[0], image=f"inputs/{'0' * 64}.jpg", name="photo").model_dump(mode="json")
    common = (snapshot.groups, snapshot.pauses, snapshot.no_group)
    if spec.at is None:
        jobs = [job for job in snapshot.jobs if job.is_readable]
        return estimate_all(jobs, with_more(snapshot.waiting, parameters, num_videos), *common)
    alone = estimate_all([], with_more(Waiting(), parameters, num_videos), *common)
    if alone.eta_s is None:
        return alone
    begin_s = max(0.0, (spec.at - now).total_seconds(), snapshot.estimate.eta_s or 0.0)
    return Estimate(eta_s=begin_s + alone.eta_s)


def whole_number(text: str, called: str) -> int:
    """Parse a number; raises InputError with its name `called` if it is no whole number."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InputError(f"{called} {text[:80]!r} is not allowed: it must be a whole number, such as 3.")
    return int(text)
