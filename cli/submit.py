"""`svdq submit`: photos into the queue."""

import json
import re
from pathlib import Path
from typing import Any

import click

from svdq.cli.main import redis_options
from svdq.pipeline.errors import InputError

#: The choices of `svdq.producer.job`, here so that `--help` needs no pydantic; a test holds them equal.
FORMATS = ("mp4", "gif", "webp", "png")
FITS = ("crop", "pad", "stretch")
PRIORITIES = ("high", "default", "low")

EXAMPLES = """\b
Examples:
  svdq submit photo.jpg
  svdq submit photo.jpg --frames 25 --wait
  svdq submit holiday/*.jpg --size 576x320 --format mp4 --format gif
  svdq submit other.jpg --like video.mp4
"""


def _read_size(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Read `1024x576`; which sizes are allowed is for the job to say."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})[xX](\d{1,6})", value)
    if match is None:
        raise InputError(f"--size {value} is not a size; write width and height in pixels, such as 1024x576.")
    return int(match[1]), int(match[2])


@click.command(epilog=EXAMPLES)
@click.argument("photos", metavar="PHOTO...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--frames", type=int, help="Number of frames [default: the model's own].")
@click.option("--steps", type=int, help="Denoising steps [default: 25].")
@click.option("--size", metavar="WxH", callback=_read_size, help="Pixels, multiples of 64 [default: 1024x576].")
@click.option("--fps", type=int, help="Frames a second [default: 7].")
@click.option("--seed", type=int, help="Seed of the noise [default: drawn, and recorded].")
@click.option("--motion-bucket-id", type=int, help="How much motion, 1 to 255 [default: 127].")
@click.option("--noise-aug-strength", type=float, help="Noise added to the photo [default: 0.02].")
@click.option("--min-guidance-scale", type=float, help="Guidance of the first frame [default: 1.0].")
@click.option("--max-guidance-scale", type=float, help="Guidance of the last frame [default: 3.0].")
@click.option("--decode-chunk-size", type=int, help="Frames decoded at a time [default: all].")
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(FORMATS), help="File to write; repeatable [default: mp4]."
)
@click.option("--fit", type=click.Choice(FITS), help="For photos of another shape [default: crop].")
@click.option("--priority", type=click.Choice(PRIORITIES), default="default", show_default=True, help="Which queue.")
@click.option(
    "--like", type=click.Path(path_type=Path), metavar="FILE", help="Same parameters and seed as that video; flags win."
)
@click.option("--force", is_flag=True, help="Render anew although the same job exists.")
@click.option("--wait", "do_wait", is_flag=True, help="Wait until the videos are finished.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each photo, one a line.")
@click.option("--storage", metavar="URL", help="Folder or fsspec URL [default: under the home, or SVDQ_STORAGE].")
@redis_options
def submit(
    photos: tuple[Path, ...],
    size: tuple[int, int] | None,
    formats: tuple[str, ...],
    priority: str,
    like: Path | None,
    force: bool,
    do_wait: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    **parameters: Any,
) -> int:
    """Submit photos to be made into videos, one job each.

    The same photo with the same parameters is the same job: submitting it again returns the one that is there.
    """
    # Imported here: `svdq submit --help` needs none of it.
    from svdq.producer.settings import Settings
    from svdq.producer.submit import SubmitOptions
    from svdq.producer.submit import submit as submit_photos

    settings = Settings.load(redis_url=redis_url, storage=storage)
    width, height = size or (None, None)
    # A format named twice is wanted once.
    options = SubmitOptions(width=width, height=height, formats=tuple(dict.fromkeys(formats)) or None, **parameters)
    if like is not None:
        from svdq.producer.provenance import read_provenance

        options = options.over(read_provenance(like)["job"])
    submissions = submit_photos(settings, photos, options, priority, force)

    exit_code = 0
    views = {}
    if not as_json:
        for submission in submissions:
            note = "" if submission.is_new else f" (exists already, {submission.status}; --force renders anew)"
            hint = "" if do_wait else f"  svdq wait {submission.id}"
            click.echo(f"{submission.id}  {submission.name}{note}{hint}")
    if do_wait:
        from svdq.cli.wait import wait_for

        ended, exit_code = wait_for(settings, [submission.id for submission in submissions], quiet=as_json)
        views = {view.id: view for view in ended}
    if as_json:
        for submission in submissions:
            answer: dict[str, Any] = {name: getattr(submission, name) for name in ("id", "image", "seed", "status")}
            if view := views.get(submission.id):
                answer |= {"status": view.status, "outputs": list(view.outputs), "error": view.error}
            click.echo(json.dumps(answer))
    return exit_code
