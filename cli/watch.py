"""`svdq watch`: submit photos that are dropped into a folder."""

import signal
from pathlib import Path
from typing import Any

import click

from svdq.cli.formatting import echo, echo_json
from svdq.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, StopSignals, notify_systemd
from svdq.cli.option_types import GivenPath, json_option, storage_options
from svdq.cli.video_options import (
    VideoCommand,
    keep_location_option,
    like_option,
    output_option,
    parameter_options,
    priority_option,
    then_option,
    with_defaults_from,
)
from svdq.pipeline.errors import InputError
from svdq.producer.settings_loader import load_for_watching
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.text import parse_duration
from svdq.producer.threads import within
from svdq.producer.watching.folder_config import PHOTO_GLOBS, FileFilter, WatchOptions
from svdq.producer.watching.state import Event
from svdq.producer.watching.watcher import watch as watch_folder


def _parse_stable_for(_context: click.Context, _option: click.Parameter, value: str) -> float:
    """Parse a duration; a number without a unit is in seconds."""
    seconds = parse_duration(value if value[-1:].isalpha() else f"{value}s", "--stable-for").total_seconds()
    if seconds == 0:
        raise InputError(f"--stable-for {value} is not allowed: it must be longer than 0, such as 2s.")
    return seconds


@click.command(cls=VideoCommand)
@click.argument("folder", type=GivenPath())
@click.option("--recursive", is_flag=True, help="Include subfolders; outputs have the same folders.")
@click.option("--glob", "globs", multiple=True, metavar="PATTERN", help="Only these; repeatable [default: all photos].")
@click.option("--existing", is_flag=True, help="Include photos that were in the folder before it was first watched.")
@click.option(
    "--stable-for",
    "stable_for_s",
    default="2s",
    show_default=True,
    metavar="TIME",
    callback=_parse_stable_for,
    help="Submit a file when it has not changed for this long.",
)
@click.option(
    "--on-success",
    default="keep",
    show_default=True,
    metavar="keep|move:DIR|delete",
    help="What to do with a submitted photo; DIR is in FOLDER.",
)
@click.option("--once", is_flag=True, help="Submit the photos in the folder, then exit; for cron. Implies --existing.")
@parameter_options
@like_option
@priority_option
@then_option
@output_option
@keep_location_option
@json_option("event")
@storage_options
def watch(
    folder: Path,
    recursive: bool,
    globs: tuple[str, ...],
    once: bool,
    draft: Draft,
    like: Path | None,
    priority: str,
    then: tuple[str, ...],
    output: str,
    keep_location: bool,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    **watching: Any,
) -> int:
    """Submit photos as they are dropped into FOLDER, each once.

    Submitted photos are recorded, so the watcher can be stopped, killed and started again: it then submits the photos
    dropped meanwhile. A file svdq.toml in a folder sets the parameters of the photos in it (frames = 25,
    size = "576x320", …) and overrides the flags. For models that take them, photo.txt beside photo.jpg is its prompt,
    unless --prompt is given, and photo.last.jpg its last frame. Files that are not photos are reported once and, unless
    photos are kept, moved to FOLDER/rejected. Symbolic links are not followed.

    Ctrl-C or SIGTERM finishes the current photo and exits.

    \b
    Examples:
      svdq watch ~/inbox --recursive --existing --frames 25
      svdq watch /srv/drop --on-success move:done --glob '*.jpg' --glob '*.png'
      svdq watch ~/inbox --once --on-success move:done
      svdq watch ~/inbox --recursive --output '{folder}/{photo}-{date}'
    """
    settings = load_for_watching(folder, redis_url=redis_url, storage=storage)
    spec = JobSpec(
        drafts=with_defaults_from(like, [draft]),
        priority=priority,
        then=then,
        keep_location=keep_location,
        owner=settings.owner,
    ).with_output(output or settings.output)
    selection = FileFilter(recursive=recursive, globs=globs or PHOTO_GLOBS)

    def report(event: Event) -> None:
        echo_json(event.as_json()) if as_json else echo(event.text, err=event.kind in ("problem", "resolved"))
        if event.kind == "watching":
            notify_systemd()

    with StopSignals() as stop:
        how = WatchOptions(selection=selection, once=once, **watching)
        # In a thread: a photo on a mount that does not answer would hold back the second Ctrl-C.
        counts = within(None, lambda: watch_folder(settings, folder, spec, how, report, stop.is_set))
    if stop.number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if once and (counts["rejected"] or counts["waiting"]) else 0
