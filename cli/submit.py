"""`svdq submit`: submit photos."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option
from svdq.cli.option_types import GivenPath
from svdq.cli.parameters import VideoCommand, parameter_options, priority_option, read_options, submission_options


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
@click.option(
    "--variations",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    help="Videos per photo, with random seeds, or with --seed and the seeds after it.",
)
@click.option(
    "--sweep",
    "sweeps",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="A video for each value, such as motion_bucket_id=60,127,180; repeatable, for all combinations.",
)
@priority_option
@click.option(
    "--at", metavar="TIME", help="Queue then: 22:00, +2h, or a date and time such as 2027-01-31T22:00; local time."
)
@click.option(
    "--depends-on",
    metavar="ID",
    multiple=True,
    help="Queue when that job has finished or failed; ids may be shortened; repeatable.",
)
@click.option(
    "--name",
    metavar="TEMPLATE",
    help="Pattern for file names, such as '{stem}-{seed}'; also {index}, {variation} and the parameters.",
)
@click.option(
    "--output", "folder", metavar="DIR", default="", help="Folder for the files, below outputs/ of the storage."
)
@click.option("--like", type=GivenPath(), metavar="FILE", help="Use that video's parameters and seed; flags win.")
@submission_options
@storage_option
@redis_options
def submit(
    photos: tuple[str, ...],
    recursive: bool,
    sweeps: tuple[str, ...],
    at: str | None,
    folder: str,
    like: Path | None,
    skip_bad: bool,
    do_wait: bool,
    verbose: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    variations: int,
    priority: str,
    depends_on: tuple[str, ...],
    name: str | None,
    force: bool,
    **parameters: Any,
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
    from datetime import datetime

    from svdq.cli.submissions import submit_and_print
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.submitting.job_spec import JobSpec, read_folder
    from svdq.producer.submitting.options import sweep
    from svdq.producer.submitting.sources import find_photos
    from svdq.producer.submitting.submit import expected_model, requests_for
    from svdq.producer.timeparse import parse_future

    settings = Settings.load(redis_url=redis_url, storage=storage)
    options = sweep(read_options(**parameters), sweeps)
    if like is not None:
        from svdq.producer.results.provenance import read_provenance

        recorded = read_provenance(like)["job"]
        options = tuple(each.with_defaults_from(recorded) for each in options)
    spec = JobSpec(
        options=options,
        model=expected_model(settings),
        variations=variations,
        priority=priority,
        name=name,
        folder=read_folder(folder),
        at=parse_future(at, "--at", datetime.now().astimezone()) if at is not None else None,
        depends_on=tuple(dict.fromkeys(depends_on)),
        force=force,
    )
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
