"""Options that several commands share: the parameters of videos, derived from the jobs, and the submission options."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from svdq.cli.option_types import Command, GivenPath, SectionedCommand, amount_options, json_option, with_options
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.keys import PRIORITIES
from svdq.producer.submitting.draft import Draft, read_draft, sweep
from svdq.producer.submitting.parameters import as_flag, rules_of

if TYPE_CHECKING:
    from svdq.producer.settings import Settings
    from svdq.producer.submitting.job_spec import JobSpec


class VideoCommand(SectionedCommand):
    """A command whose help has a section for the options of each family of models."""

    def section_of(self, option: click.Option) -> str:
        """Return the section of the only family that has a parameter, else the common one."""
        families = [job.title for job in JOBS.values() if option.name in job.model_fields]
        is_own = 0 < len(families) < len(JOBS)
        return f"Options for {' and '.join(families)}" if is_own else super().section_of(option)


_OPEN_DEFAULTS = {
    "seed": "random, and recorded",
    "decode_chunk_size": "as many as fit into memory",
    "interpolate": "none",
    "upscale": "none",
    "model": "any of the family",
    "prompt": "the text of a .txt beside the photo, or none",
}
_MODELS_OWN = "the model's own"
_METAVARS = {"upscale": "FACTOR|WxH"}
_MAX_SHOWN = 1_000_000  # limits from here on are not shown: they do not help a reader
_TYPES = {"integer": int, "number": float, "string": str}


def _option(name: str) -> Callable[[Command], Command]:
    """Build the option of a parameter, whose range the job checks."""
    families = [family for family in JOBS if name in rules_of(family)]
    rules = rules_of(families[0])[name]
    if rules["type"] == "boolean":
        flag = f"{as_flag(name)}/--no-{as_flag(name)[2:]}" if rules.get("default") else as_flag(name)
        return click.option(flag, is_flag=True, default=None, help=f"{rules['description']}.")
    has_limits = "minimum" in rules and rules.get("maximum", _MAX_SHOWN) < _MAX_SHOWN
    limits = f"{rules['minimum']:g} to {rules['maximum']:g}; " if has_limits else ""
    defaults = _by_family({family: _default(name, family) for family in families})
    return click.option(
        as_flag(name),
        type=click.Choice(rules["enum"]) if "enum" in rules else _TYPES[rules["type"]],
        metavar=_METAVARS.get(name),
        help=f"{rules['description']} [{limits}default: {defaults}].",
    )


def _default(name: str, family: str) -> str:
    default, step = rules_of(family)[name].get("default"), JOBS[family].frame_step
    rule = f", 1 more than a multiple of {step}" if name == "frames" and step > 1 else ""
    return f"{_OPEN_DEFAULTS.get(name) or (default if default is not None else _MODELS_OWN)}{rule}"


def _by_family(texts: Mapping[str, str]) -> str:
    """Join the texts of families; one that equals the first is left out."""
    first = next(iter(texts.values()))
    return "; ".join(
        [first, *(f"{PARAMETERS[family].title}: {text}" for family, text in texts.items() if text != first)]
    )


def _size(family: str) -> str:
    width, height = (rules_of(family)[side]["default"] for side in ("width", "height"))
    return f"{f'{width}x{height}' if width and height else _MODELS_OWN}, multiples of {JOBS[family].side_multiple}"


def parameter_options(command: Command) -> Command:
    """Add the options of video parameters to a `VideoCommand`, and hand over what they give as `draft`."""

    @functools.wraps(command)
    def with_draft(*args: Any, **values: Any) -> Any:
        given = {name: value for name in (*VIDEO_FIELDS, "size") if (value := values.pop(name, None)) != ()}
        return command(*args, draft=read_draft(given, as_flag), **values)

    family = click.option(
        "--family",
        type=click.Choice(tuple(JOBS)),
        help="Family of models [default: by the other parameters, the configured model, the workers, or a prompt "
        f"beside a photo; else {DEFAULT_FAMILY}].",
    )
    size = click.option(
        "--size",
        metavar="WxH|auto",
        help="Size in pixels; auto: the shape of the photo, with at most as many pixels as by default; auto:576x320: "
        "with at most as many as 576x320 "
        f"[default: {_by_family({family: _size(family) for family in JOBS})}].",
    )
    formats = next(map(rules_of, JOBS))["formats"]
    file_format = click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(formats["items"]["enum"]),
        help=f"{formats['description']}; repeatable [default: {' '.join(formats['default'])}].",
    )
    loras = click.option(
        "--lora",
        "loras",
        metavar="NAME[:STRENGTH]",
        multiple=True,
        help="LoRA in the folder SVDQ_LORAS, and its strength; for two experts high=NAME,low=NAME:STRENGTH; "
        "repeatable.",
    )
    step_cache = click.option(
        "--step-cache",
        metavar="THRESHOLD|1.5x",
        help="Skip steps that change little: up to this estimated error, such as 0.06, or enough to make the steps so "
        "many times as fast [0 to 1; default: 0, none].",
    )
    own = ("family", "width", "height", "formats", "fit", "loras", "step_cache")
    plain = [_option(name) for name in VIDEO_FIELDS if name not in own]
    return with_options(
        cast(Command, with_draft), [family, size, *plain, step_cache, loras, file_format, _option("fit")]
    )


priority_option = click.option(
    "--priority", type=click.Choice(PRIORITIES), default="default", show_default=True, help="Queue."
)

then_option = click.option(
    "--then",
    metavar="PROMPT",
    multiple=True,
    help="Continue the video from its last frame with this prompt, '' for none, in a separate job; repeatable.",
)

like_option = click.option(
    "--like", type=GivenPath(), metavar="FILE", help="Use that video's parameters and seed; flags win."
)

output_option = click.option(
    "--output",
    metavar="TEMPLATE",
    default="",
    help="Folder for the files, below outputs/ of the storage, such as 'trip/{date}/', or with the name of the "
    "files, such as '{folder}/{photo}-{prompt:.40}'.",
)

keep_location_option = click.option(
    "--keep-location", is_flag=True, help="Copy where the photo was taken into the video's files."
)

#: Options of jobs besides their parameters, and of how they are submitted.
_JOB_OPTIONS = (
    click.option(
        "--variations",
        metavar="N",
        type=click.IntRange(min=1),
        default=1,
        help="Videos per photo, with random seeds or, with --seed, with that seed and the following ones.",
    ),
    click.option(
        "--sweep",
        "--vary",
        "sweeps",
        metavar="NAME=VALUE,...",
        multiple=True,
        help="A video for each value, such as motion_bucket_id=60,127,180; repeatable, for all combinations.",
    ),
    priority_option,
    click.option(
        "--at",
        metavar="TIME",
        help="Queue at this time: 22:00, +2h, or a date and time such as 2027-01-31T22:00; local time.",
    ),
    click.option(
        "--depends-on",
        metavar="ID",
        multiple=True,
        help="Queue when that job has finished or failed; ids may be shortened; repeatable.",
    ),
    then_option,
    click.option(
        "--name",
        metavar="TEMPLATE",
        help="Pattern for file names, such as '{photo}-{seed}'; also {n}, {folder}, {date}, {taken}, parameters.",
    ),
    output_option,
    like_option,
    click.option("--force", is_flag=True, help="Render again although the same job exists."),
    click.option(
        "--replace",
        "do_replace",
        is_flag=True,
        help="Cancel your older videos of these photos that still wait, as soon as the new ones are queued.",
    ),
    keep_location_option,
    click.option("--skip-bad", is_flag=True, help="Leave out bad photos, with the reason; the exit code is then 1."),
    click.option("--dry-run", is_flag=True, help="Check all, and say what would be queued and for how long."),
    click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished."),
    amount_options("jobs"),
    json_option("job"),
)


def job_options(command: Command) -> Command:
    """Add the options of jobs and of how they are submitted; `read_spec` converts their values."""
    return with_options(command, _JOB_OPTIONS)


def with_defaults_from(like: Path | None, drafts: Sequence[Draft]) -> tuple[Draft, ...]:
    """Fill the parameters that were not given from a video's; raises InputError if they cannot be read."""
    if like is None:
        return tuple(drafts)
    from svdq.producer.results.finished_videos import read_provenance

    recorded = read_provenance(like).job
    return tuple(each.with_defaults_from(recorded) for each in drafts)


def read_spec(
    settings: "Settings",
    *,
    draft: Draft,
    sweeps: Sequence[str],
    at: str | None,
    depends_on: Sequence[str],
    output: str,
    like: Path | None,
    recorded: Mapping[str, Any] | None = None,
    **plain: Any,
) -> "JobSpec":
    """Convert the values of `job_options`, of which `plain` are as they are; asks which model workers run.

    Parameters that are not given are of the video `like`, or of a `recorded` job.
    """
    from svdq.producer.connection import time_by_redis
    from svdq.producer.submitting.job_spec import JobSpec
    from svdq.producer.submitting.model_choice import expect
    from svdq.producer.text import parse_future

    drafts = with_defaults_from(like, sweep(draft, sweeps))
    if recorded is not None:
        drafts = tuple(each.with_defaults_from(recorded) for each in drafts)
    found = {name: expect(settings, named=name) for name in dict.fromkeys(each.model for each in drafts)}
    if len(found) > 1:  # each decides the family of its videos
        models = {name: each.model for name, each in found.items()}
        families = {name: model.family.name for name, model in models.items() if model and not model.is_configured}
        drafts = tuple(replace(each, family=each.family or families.get(each.model)) for each in drafts)
    return JobSpec(
        drafts=drafts,
        expected=next(iter(found.values())) if len(found) == 1 else expect(settings),
        at=parse_future(at, "--at", time_by_redis(settings)) if at is not None else None,
        depends_on=tuple(dict.fromkeys(depends_on)),
        owner=settings.owner,
        **plain,
    ).with_output(output or settings.output)
