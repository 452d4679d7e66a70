"""`svdq submit`: submit photos."""

import os
import sys
from typing import Any

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option
from svdq.cli.video_options import VideoCommand, job_options, parameter_options, read_spec, submission_options


class _PhotosCommand(VideoCommand):
    """Accepts a file whose name begins with a dash, as a shell's `*.jpg` may give it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Prefix arguments that are files, not options, with ./."""
        options = {opt for parameter in self.get_params(ctx) for opt in parameter.opts}

        def is_file(arg: str) -> bool:
            return arg.startswith("-") and arg.partition("=")[0] not in options and os.path.isfile(arg)

        return super().parse_args(ctx, [f"./{arg}" if is_file(arg) else arg for arg in args])


@click.command(cls=_PhotosCommand)
@click.argument("photos", metavar="PHOTO...", nargs=-1, required=True, shell_complete=click.Path().shell_complete)
@click.option("--recursive", is_flag=True, help="Include subfolders; videos keep the folders of their photos.")
@parameter_options
@job_options
@submission_options
@storage_option
@redis_options
def submit(
    photos: tuple[str, ...],
    recursive: bool,
    skip_bad: bool,
    do_wait: bool,
    verbose: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    **options: Any,
) -> int:
    """Submit photos to be made into videos, one job each.

    PHOTO is a file, a folder, a pattern in quotes such as 'holiday/*.jpg', or - for paths on standard input, separated
    by newlines or null bytes. Folders and patterns select files with the suffix of a photo.

    All photos are checked first. If one is bad, nothing is submitted, unless --skip-bad leaves it out. The same photo
    with the same parameters is the same job: submitting it again returns the existing job, so an interrupted command
    can be repeated, and queues it again if it failed or was canceled. Another --name or --output makes it another job.

    For models that take prompts, photo.txt beside photo.jpg is its prompt, unless --prompt is given.

    \b
    Examples:
      svdq submit photo.jpg
      svdq submit photo.jpg --frames 25 --wait
      svdq submit holiday/ --recursive --output holiday --at 22:00
      svdq submit 'holiday/*.jpg' --size 576x320 --format mp4 --format gif
      svdq submit photo.jpg --variations 4 --sweep motion_bucket_id=60,127,180
      svdq submit photo.jpg --prompt "A wave breaks on the beach." --frames 81 --size 832x480
      svdq submit photo.jpg --name '{stem}-{seed}'
      find . -name '*.jpg' -newer last | svdq submit -
      svdq submit other.jpg --like video.mp4
    """
    # Imported here so that `svdq submit --help` stays fast.
    from svdq.cli.submissions import submit_and_print
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.submitting.sources import find_photos
    from svdq.producer.submitting.submission import requests_for

    settings = load_settings(redis_url=redis_url, storage=storage)
    spec = read_spec(settings, **options)
    sources = find_photos(
        photos,
        recursive=recursive,
        stdin=sys.stdin.buffer if sys.stdin else None,
        storage=Storage(settings.storage).folder,
    )
    if sources.num_others:
        echo(f"Files left out because they have no photo suffix: {sources.num_others:,}.", err=True)
    requests = requests_for(sources, spec)
    return submit_and_print(settings, requests, skip_bad=skip_bad, do_wait=do_wait, verbose=verbose, as_json=as_json)
