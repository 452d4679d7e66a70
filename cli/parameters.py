"""The options that commands which submit have in common: how videos are made, and what is told. Knows no queue."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

#: The choices of `svdq.producer.job`, here so that `--help` needs no pydantic; a test holds them equal.
FORMATS = ("mp4", "gif", "webp", "png")
FITS = ("crop", "pad", "stretch")
PRIORITIES = ("high", "default", "low")

Command = TypeVar("Command", bound=Callable[..., Any])


def read_size(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Read `1024x576`; which sizes are allowed is for the job to say."""
    if value is None:
        return None
    from svdq.producer.submitting.fields import read_field  # which needs pydantic, and `--help` does not

    size = read_field("size", value, "--size")
    return size["width"], size["height"]


_OPTIONS = (
    click.option("--frames", type=int, help="Number of frames [default: the model's own]."),
    click.option("--steps", type=int, help="Denoising steps [default: 25]."),
    click.option("--size", metavar="WxH", callback=read_size, help="Pixels, multiples of 64 [default: 1024x576]."),
    click.option("--fps", type=int, help="Frames a second [default: 7]."),
    click.option("--seed", type=int, help="Seed of the noise [default: drawn, and recorded]."),
    click.option("--motion-bucket-id", type=int, help="How much motion, 1 to 255 [default: 127]."),
    click.option("--noise-aug-strength", type=float, help="Noise added to the photo [default: 0.02]."),
    click.option("--min-guidance-scale", type=float, help="Guidance of the first frame [default: 1.0]."),
    click.option("--max-guidance-scale", type=float, help="Guidance of the last frame [default: 3.0]."),
    click.option("--decode-chunk-size", type=int, help="Frames decoded at a time [default: as many as memory takes]."),
    click.option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice(FORMATS),
        help="File to write; repeatable [default: mp4].",
    ),
    click.option("--fit", type=click.Choice(FITS), help="For photos of another shape [default: crop]."),
)
_SUBMISSION_OPTIONS = (
    click.option("--force", is_flag=True, help="Render anew although the same job exists."),
    click.option("--skip-bad", is_flag=True, help="Leave out bad photos, with the reason; the exit code is 1 then."),
    click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line."),
)


def parameter_options(command: Command) -> Command:
    """Add the options that say how a video is made; `given` reads what they give."""
    return _with(command, _OPTIONS)


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
