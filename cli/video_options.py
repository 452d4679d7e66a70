"""Options that several commands share: the parameters of videos, derived from the jobs, and the submission options."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import annotated_types
import click

from svdq.cli.option_types import Command, GivenPath, SectionedCommand, json_option, verbose_option, with_options
from svdq.pipeline.models.family_parameters import PARAMETERS
from svdq.pipeline.parameters import Format
from svdq.producer.job import JOBS, VIDEO_FIELDS, Job
from svdq.producer.keys import PRIORITIES
from svdq.producer.submitting.parameters import FIELD_OF, SubmitOptions, as_flag, read_field, sweep

if TYPE_CHECKING:
    from svdq.producer.settings import Settings
    from svdq.producer.submitting.job_spec import JobSpec


class VideoCommand(SectionedCommand):
    """A command whose help has a section for the options of each family of models."""

    def section_of(self, option: click.Option) -> str:
        """Return the section of the only family that has a parameter, or that of all."""
        families = [job.title for job in JOBS.values() if option.name in job.model_fields]
        return f"Options for {families[0]}" if 0 < len(families) < len(JOBS) else super().section_of(option)


def _read_size(_context: click.Context, _option: click.Parameter, value: str | None) -> dict[str, Any]:
    """Parse `1024x576` or `auto`; the job checks which sizes are allowed."""
    return {} if value is None else read_field("size", value, "--size")


#: Default of a parameter, in words, where it has none.
_OPEN_DEFAULTS = {
    "seed": "random, and recorded",
    "decode_chunk_size": "as many as fit into memory",
    "interpolate": "none",
    "prompt": "that of a .txt beside the photo, or none",
}
#: Default of a parameter that is left to the model.
_MODELS_OWN = "the model's own"
#: Larger limits are not shown: they do not help a reader.
_MAX_SHOWN = 1_000_000


def _option(name: str) -> Callable[[Command], Command]:
    """Build the option of a parameter; the job checks the range, with one sentence for every source of parameters."""
    field, families = FIELD_OF[name], [job for job in JOBS.values() if name in job.model_fields]
    bounds = {type(bound): bound for bound in field.metadata}
    low, high = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    limits = f"{low.ge:g} to {high.le:g}; " if low and high and high.le < _MAX_SHOWN else ""
    kind = _type(field.annotation)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if kind is bool:
        return click.option(as_flag(name), is_flag=True, default=None, help=f"{field.description}.")
    return click.option(
        as_flag(name),
        type=click.Choice(choices) if choices else kind,
        help=f"{field.description} [{limits}default: {_by_family([_default(name, job) for job in families])}].",
    )


def _type(annotation: Any) -> Any:
    """Return the type of a value that may be None or have limits."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return _type(kinds[0]) if kinds else annotation


def _default(name: str, job: type[Job]) -> str:
    default = job.model_fields[name].default
    rule = f", 1 more than a multiple of {job.frame_step}" if name == "frames" and job.frame_step > 1 else ""
    return f"{_OPEN_DEFAULTS.get(name) or (default if default is not None else _MODELS_OWN)}{rule}"


def _by_family(texts: Sequence[str]) -> str:
    """Join what holds for each family; texts that are the same for all appear once."""
    others = zip(list(PARAMETERS.values())[1:], texts[1:], strict=False)
    return "; ".join([texts[0], *(f"{cls.title}: {text}" for cls, text in others if text != texts[0])])


def _size(job: type[Job]) -> str:
    width, height = (job.model_fields[side].default for side in ("width", "height"))
    return f"{f'{width}x{height}' if width and height else _MODELS_OWN}, multiples of {job.side_multiple}"


def _options() -> list[Callable[[Command], Command]]:
    family = click.option(
        "--family",
        type=click.Choice(tuple(JOBS)),
        help="Family of models [default: that of the other parameters, of the configured model, of the workers, or of "
        "a prompt beside a photo; else svd].",
    )
    size = click.option(
        "--size",
        metavar="WxH|auto",
        callback=_read_size,
        help="Size in pixels; auto: the shape of the photo with as many pixels; auto:576x320: with as many as that "
        f"[default: {_by_family([_size(job) for job in JOBS.values()])}].",
    )
    formats = FIELD_OF["formats"]
    file_format = click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(get_args(Format)),
        help=f"{formats.description}; repeatable [default: {' '.join(formats.default)}].",
    )
    own = ("family", "width", "height", "formats", "fit")
    plain = [name for name in VIDEO_FIELDS if name not in own]
    return [family, size, *map(_option, plain), file_format, _option("fit")]


_SUBMISSION_OPTIONS = (
    click.option("--force", is_flag=True, help="Render again although the same job exists."),
    click.option("--skip-bad", is_flag=True, help="Leave out bad photos, with the reason; the exit code is then 1."),
    click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished."),
    verbose_option("jobs"),
    json_option("job"),
)

priority_option = click.option(
    "--priority", type=click.Choice(PRIORITIES), default="default", show_default=True, help="Queue."
)


like_option = click.option(
    "--like", type=GivenPath(), metavar="FILE", help="Use that video's parameters and seed; flags win."
)

#: What a `JobSpec` has besides the parameters.
_JOB_OPTIONS = (
    click.option(
        "--variations",
        metavar="N",
        type=click.IntRange(min=1),
        default=1,
        help="Videos per photo, with random seeds, or with --seed and the seeds after it.",
    ),
    click.option(
        "--sweep",
        "sweeps",
        metavar="NAME=VALUE,...",
        multiple=True,
        help="A video for each value, such as motion_bucket_id=60,127,180; repeatable, for all combinations.",
    ),
    priority_option,
    click.option(
        "--at", metavar="TIME", help="Queue then: 22:00, +2h, or a date and time such as 2027-01-31T22:00; local time."
    ),
    click.option(
        "--depends-on",
        metavar="ID",
        multiple=True,
        help="Queue when that job has finished or failed; ids may be shortened; repeatable.",
    ),
    click.option(
        "--name",
        metavar="TEMPLATE",
        help="Pattern for file names, such as '{stem}-{seed}'; also {index}, {variation} and the parameters.",
    ),
    click.option(
        "--output", "folder", metavar="DIR", default="", help="Folder for the files, below outputs/ of the storage."
    ),
    like_option,
)


def job_options(command: Command) -> Command:
    """Add the options of jobs; `read_spec` converts their values, with those of `parameter_options` and `--force`."""
    return with_options(command, _JOB_OPTIONS)


def parameter_options(command: Command) -> Command:
    """Add the options of video parameters to a `VideoCommand`; `read_options` converts their values."""
    return with_options(command, _options())


def submission_options(command: Command) -> Command:
    """Add the options of how photos are submitted and reported."""
    return with_options(command, _SUBMISSION_OPTIONS)


def read_options(*, size: dict[str, Any], formats: tuple[str, ...], **parameters: Any) -> SubmitOptions:
    """Convert the values of `parameter_options`; a repeated format counts once."""
    texts = {name: value.strip() for name, value in parameters.items() if isinstance(value, str)}
    return SubmitOptions(**(parameters | texts | size), formats=tuple(dict.fromkeys(formats)) or None)


def with_defaults_from(like: Path | None, options: Sequence[SubmitOptions]) -> tuple[SubmitOptions, ...]:
    """Fill what was not given from the parameters of a video; raises InputError if they cannot be read."""
    if like is None:
        return tuple(options)
    from svdq.producer.results.finished_videos import read_provenance

    recorded = read_provenance(like)["job"]
    return tuple(each.with_defaults_from(recorded) for each in options)


def read_spec(
    settings: "Settings",
    *,
    variations: int,
    sweeps: Sequence[str],
    priority: str,
    at: str | None,
    depends_on: Sequence[str],
    name: str | None,
    folder: str,
    like: Path | None,
    force: bool,
    **parameters: Any,
) -> "JobSpec":
    """Convert the values of `job_options` and `parameter_options`; asks which model workers run if that decides."""
    from datetime import datetime

    from svdq.producer.submitting.job_spec import JobSpec, read_folder
    from svdq.producer.submitting.submission import expected_model
    from svdq.producer.text import parse_future

    return JobSpec(
        options=with_defaults_from(like, sweep(read_options(**parameters), sweeps)),
        model=expected_model(settings),
        variations=variations,
        priority=priority,
        name=name,
        folder=read_folder(folder),
        at=parse_future(at, "--at", datetime.now().astimezone()) if at is not None else None,
        depends_on=tuple(dict.fromkeys(depends_on)),
        force=force,
    )
