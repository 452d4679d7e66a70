"""The options that several commands share: how videos are made, derived from `Job`, and how photos are submitted."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import annotated_types
import click
from pydantic.fields import FieldInfo

from svdq.pipeline.parameters import SIZE_MULTIPLE, Format, VideoParameters
from svdq.producer import keys
from svdq.producer.job import Job

#: Most urgent first.
PRIORITIES = tuple(name.removeprefix("svdq-") for name in keys.QUEUE_NAMES)

Command = TypeVar("Command", bound=Callable[..., Any])


def read_size(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Read `1024x576`; which sizes are allowed is for the job to say."""
    if value is None:
        return None
    from svdq.producer.submitting.fields import read_field  # which needs pydantic, and `--help` does not

    size = read_field("size", value, "--size")
    return size["width"], size["height"]


#: What a parameter is when it is left open.
_OPEN_DEFAULTS = {
    "frames": "the model's own",
    "seed": "drawn, and recorded",
    "decode_chunk_size": "as many as fit into memory",
}
#: Larger limits say nothing to a person.
_MAX_SHOWN = 1_000_000


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    """Make the option of a parameter; whether a value is in its range is for the job to say, with one sentence."""
    bounds = {type(bound): bound for bound in field.metadata}
    low, high = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    limits = f"{low.ge:g} to {high.le:g}; " if low and high and high.le < _MAX_SHOWN else ""
    default = _OPEN_DEFAULTS.get(name, field.default)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return click.option(
        f"--{name.replace('_', '-')}",
        type=click.Choice(choices) if choices else kinds[0],
        help=f"{field.description} [{limits}default: {default}].",
    )


def _options() -> list[Callable[[Command], Command]]:
    width, height = (VideoParameters.model_fields[side].default for side in ("width", "height"))
    size = click.option(
        "--size",
        metavar="WxH",
        callback=read_size,
        help=f"Pixels, multiples of {SIZE_MULTIPLE} [default: {width}x{height}].",
    )
    formats = Job.model_fields["formats"]
    fit = _option("fit", Job.model_fields["fit"])
    file_format = click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(get_args(Format)),
        help=f"{formats.description}; repeatable [default: {' '.join(formats.default)}].",
    )
    plain = {name: field for name, field in VideoParameters.model_fields.items() if name not in ("width", "height")}
    return [size, *(_option(name, field) for name, field in plain.items()), file_format, fit]


_SUBMISSION_OPTIONS = (
    click.option("--force", is_flag=True, help="Render anew although the same job exists."),
    click.option("--skip-bad", is_flag=True, help="Leave out bad photos, with the reason; the exit code is 1 then."),
    click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line."),
)


def parameter_options(command: Command) -> Command:
    """Add the options that say how a video is made; `given` reads what they give."""
    return _with(command, _options())


def submission_options(command: Command) -> Command:
    """Add the options that say how photos are submitted and what is told of it."""
    return _with(command, _SUBMISSION_OPTIONS)


def _with(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def given(*, size: tuple[int, int] | None, formats: tuple[str, ...], **parameters: Any) -> dict[str, Any]:
    """Turn what the options gave into the fields of `svdq.producer.submitting.options.SubmitOptions`."""
    width, height = size or (None, None)
    # A format named twice is wanted once.
    return {"width": width, "height": height, "formats": tuple(dict.fromkeys(formats)) or None, **parameters}
