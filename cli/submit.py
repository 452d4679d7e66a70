"""`svdq submit` and `svdq batch`: submit photos, or the photos of a list, each with its own parameters."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import echo
from svdq.cli.option_types import GivenPath, ids_of_jobs, with_settings
from svdq.cli.video_options import VideoCommand, job_options, parameter_options, read_spec
from svdq.pipeline.errors import InputError
from svdq.producer.job import PARAMETER_KEYS

if TYPE_CHECKING:
    from svdq.producer.settings import Settings
    from svdq.producer.submitting.sources import PhotoRequest

PRINTING = (
    "skip_bad",
    "do_replace",
    "dry_run",
    "do_wait",
    "verbose",
    "as_json",
)  # the options that `submit_and_print` takes


@click.command(cls=VideoCommand)
@click.argument("photos", metavar="PHOTO...", nargs=-1, shell_complete=click.Path().shell_complete)
@click.option("--recursive", is_flag=True, help="Include subfolders; videos keep the folders of their photos.")
@parameter_options
@job_options
@click.option(
    "--last",
    "last_image",
    type=GivenPath(),
    metavar="PHOTO",
    help="Photo that is the last frame, for models that take one [default: name.last.jpg for name.jpg, or none].",
)
@click.option("--finish", is_flag=True, help="Upscale finished videos: the arguments are IDs of their jobs.")
@click.option("--kept", is_flag=True, help="With --finish: all videos that are marked to keep.")
@click.option(
    "--more",
    "more_like",
    metavar="ID",
    multiple=True,
    shell_complete=ids_of_jobs,
    help="In place of photos: more videos like that finished one, with other seeds; repeatable.",
)
@with_settings
def submit(
    settings: "Settings",
    photos: tuple[str, ...],
    recursive: bool,
    last_image: Path | None,
    finish: bool,
    kept: bool,
    more_like: tuple[str, ...],
    **options: Any,
) -> int:
    """Submit photos to be made into videos, one job each.

    PHOTO is a file, a folder, a pattern in quotes such as 'holiday/*.jpg', or - for paths on standard input, separated
    by newlines or null bytes. Folders and patterns select files with the suffix of a photo.

    All photos are checked first. If one is bad, nothing is submitted, unless --skip-bad leaves it out. The same
    photo with the same parameters is the same job. Submitting it again returns the existing job, or queues it again
    if it failed or was canceled, so an interrupted command can be repeated. Another --name or --output makes it
    another job.

    For models that take prompts, photo.txt beside photo.jpg is its prompt, unless --prompt is given. For models
    that take a last frame, photo.last.jpg is the last frame of photo.jpg if both are submitted.

    --more makes further videos of the photo of a finished video, with its parameters, folder and name, and new
    seeds. Flags take precedence. Each such command makes new videos.

    With --finish and --upscale, finished videos are upscaled in separate jobs, without denoising again: from their
    latents where workers keep them (SVDQ_KEEP_LATENTS), else from their mp4. The videos stay as they are.

    \b
    Examples:
      svdq submit photo.jpg
      svdq submit photo.jpg --frames 25 --wait
      svdq submit holiday/ --recursive --dry-run
      svdq submit holiday/ --recursive --output holiday --at 22:00
      svdq submit 'holiday/*.jpg' --size 576x320 --format mp4 --format gif
      svdq submit photo.jpg --variations 4 --sweep motion_bucket_id=60,127,180
      svdq submit photo.jpg --prompt "A wave breaks on the beach." --frames 81 --size 832x480
      svdq submit closed.jpg --last open.jpg --prompt "The flower opens."
      svdq submit photo.jpg --prompt "A wave rolls in." --then "It breaks." --then "The foam runs back."
      svdq submit photo.jpg --name '{stem}-{seed}'
      find . -name '*.jpg' -newer last | svdq submit -
      svdq submit holiday/ --replace
      svdq submit other.jpg --like video.mp4
      svdq submit --more 1f0c --variations 4
      svdq submit --finish 1f0c 2a7d --upscale 2
      svdq submit --finish --kept --upscale 2 --output '{folder}/upscaled'
    """
    from svdq.cli.submissions import submit_and_print
    from svdq.producer.storage.storage import Storage
    from svdq.producer.submitting.finishing import finish_requests
    from svdq.producer.submitting.photo_requests import requests_for
    from svdq.producer.submitting.sources import find_photos

    printing = {name: options.pop(name) for name in PRINTING}
    if more_like:
        if photos or finish or kept or recursive or last_image or options["like"] or printing["do_replace"]:
            raise InputError(
                "--more takes the photo and the parameters of a video; leave out PHOTO, --recursive, --last, --like, "
                "--replace, --finish and --kept."
            )
        printing["do_replace"] = None
        return submit_and_print(settings, _more_requests(settings, more_like, options), **printing)
    if finish or kept:
        if not finish or recursive or last_image or printing["do_replace"]:
            raise InputError(
                "--finish goes without --recursive, --last and --replace, and --kept only with it; see --help."
            )
        printing["do_replace"] = None
        # Without the template of the settings, the files are beside the video's.
        spec = read_spec(settings.model_copy(update={"output": ""}), **options)
        return submit_and_print(settings, finish_requests(settings, spec, photos, kept=kept), **printing)
    if not photos:
        raise click.UsageError("Missing argument 'PHOTO...'.", click.get_current_context())
    spec = read_spec(settings, **options)
    stdin, folder = sys.stdin.buffer if sys.stdin else None, Storage.open_for_command(settings.storage).folder
    sources = find_photos(photos, recursive=recursive, stdin=stdin, storage=folder)
    if sources.num_others:
        echo(f"Files left out because they have no photo suffix: {sources.num_others:,}.", err=True)
    if sources.num_below:
        echo(f"Photos in subfolders: {sources.num_below:,}; --recursive includes them.", err=True)
    return submit_and_print(settings, requests_for(sources, spec, last_image), **printing)


def _more_requests(
    settings: "Settings", job_ids: Sequence[str], options: Mapping[str, Any]
) -> list["PhotoRequest | InputError"]:
    from svdq.producer.submitting.more import read_more, request_of

    # Without the template of the settings, the files are beside the video's.
    beside = settings.model_copy(update={"output": ""})
    found = read_more(settings, job_ids)
    return [request_of(each, read_spec(beside, recorded=each.parameters, **options)) for each in found]


BATCH_HELP = f"""Submit the photos of a list, each with its own parameters.

FILE is a .csv file whose first line names the columns, or a .jsonl file with an object on each line. Columns are photo
(a path, relative to the list), last (the path of the photo of the last frame), the parameters of `svdq submit`
({", ".join(PARAMETER_KEYS)}; also
width and height instead of size), then (a prompt on each line), priority, at, name and output. An empty or missing
field takes the value of the option, such as --frames, or else its default; an empty prompt takes photo.txt beside
photo.jpg.

All rows and photos are checked before anything is submitted; each error names the line. One bad row stops the whole
submission, unless --skip-bad leaves bad rows out. Rows that were submitted before are recognized, so a list can grow
and be submitted again.
"""

BATCH_EXAMPLES = """\b
Examples:
  svdq batch tonight.csv --wait
  svdq batch tonight.csv --size 576x320 --format gif --at 22:00 --output night
\b
  tonight.csv:
    photo,frames,motion_bucket_id,name,output,at
    photos/cup.jpg,25,127,,,
    photos/dog.jpg,14,60,dog-{seed},animals,22:00
\b
  the same as tonight.jsonl:
    {"photo": "photos/cup.jpg", "frames": 25, "motion_bucket_id": 127}
    {"photo": "photos/dog.jpg", "frames": 14, "name": "dog-{seed}", "output": "animals", "at": "22:00"}
"""


@click.command(cls=VideoCommand, epilog=BATCH_EXAMPLES, help=BATCH_HELP)
@click.argument("file", type=GivenPath())
@parameter_options
@job_options
@with_settings
def batch(settings: "Settings", file: Path, **options: Any) -> int:
    """Submit the photos of a list, each with its own parameters."""
    from svdq.cli.submissions import submit_and_print
    from svdq.producer.connection import time_by_redis
    from svdq.producer.submitting.model_choice import expect
    from svdq.producer.submitting.photo_requests import read_batch

    printing = {name: options.pop(name) for name in PRINTING}
    defaults = read_spec(settings, **options)
    defaults.check()
    now, expected = cache(lambda: time_by_redis(settings)), cache(lambda name: expect(settings, named=name))
    return submit_and_print(settings, read_batch(file, now, defaults, expected), **printing)
