"""Options that several commands share: the parameters of videos, derived from `Job`, and the submission options."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import annotated_types
import click

from svdq.pipeline.parameters import SIZE_MULTIPLE, Format, VideoParameters
from svdq.producer.job import Job
from svdq.producer.keys import PRIORITIES
from svdq.producer.submitting.options import SubmitOptions, as_flag, read_field

Command = TypeVar("Command", bound=Callable[..., Any])


def _read_size(_context: click.Context, _option: click.Parameter, value: str | None) -> dict[str, int]:
    """Parse `1024x576`; the job checks which sizes are allowed."""
    return {} if value is None else read_field("size", value, "--size")


#: Default of a parameter, in words, where the job model has none.
_OPEN_DEFAULTS = {
    "frames": "the model's own",
    "seed": "random, and recorded",
    "decode_chunk_size": "as many as fit into memory",
}
#: Larger limits are not shown: they do not help a reader.
_MAX_SHOWN = 1_000_000


def _option(name: str) -> Callable[[Command], Command]:
    """Build the option of a parameter; the job checks the range, with one sentence for every source of parameters."""
    field = Job.model_fields[name]
    bounds = {type(bound): bound for bound in field.metadata}
    low, high = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    limits = f"{low.ge:g} to {high.le:g}; " if low and high and high.le < _MAX_SHOWN else ""
    default = _OPEN_DEFAULTS.get(name, field.default)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return click.option(
        as_flag(name),
        type=click.Choice(choices) if choices else kinds[0],
        help=f"{field.description} [{limits}default: {default}].",
    )


def _options() -> list[Callable[[Command], Command]]:
    width, height = (VideoParameters.model_fields[side].default for side in ("width", "height"))
    size = click.option(
        "--size",
        metavar="WxH",
        callback=_read_size,
        help=f"Size in pixels, multiples of {SIZE_MULTIPLE} [default: {width}x{height}].",
    )
    formats = Job.model_fields["formats"]
    file_format = click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(get_args(Format)),
        help=f"{formats.description}; repeatable [default: {' '.join(formats.default)}].",
    )
    plain = [name for name in VideoParameters.model_fields if name not in ("width", "height")]
    return [size, *map(_option, plain), file_format, _option("fit")]


_SUBMISSION_OPTIONS = (
    click.option("--force", is_flag=True, help="Render again although the same job exists."),
    click.option("--skip-bad", is_flag=True, help="Leave out bad photos, with the reason; the exit code is then 1."),
    click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line."),
)

priority_option = click.option(
    "--priority", type=click.Choice(PRIORITIES), default="default", show_default=True, help="Queue."
)


def parameter_options(command: Command) -> Command:
    """Add the options of video parameters; `read_options` converts their values."""
    return _with(command, _options())


def submission_options(command: Command) -> Command:
    """Add the options of how photos are submitted and reported."""
    return _with(command, _SUBMISSION_OPTIONS)


def _with(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def read_options(*, size: dict[str, int], formats: tuple[str, ...], **parameters: Any) -> SubmitOptions:
    """Convert the values of `parameter_options`; a repeated format counts once."""
    return SubmitOptions(**(parameters | size), formats=tuple(dict.fromkeys(formats)) or None)
