"""`svdq fetch` and `svdq prune`: copy and remove the files of finished videos."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from svdq.producer.results.prune import Removal

warn = partial(echo, err=True)

FETCH_EXAMPLES = """\b
Examples:
  svdq fetch 1f0c --output videos
  svdq fetch --name 'cup*' --output videos
  svdq fetch --since 22:00 --output videos
  svdq fetch --all --output videos --storage s3://bucket/prefix
"""


@click.command(epilog=FETCH_EXAMPLES)
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@click.option("--output", "-o", "folder", required=True, type=click.Path(path_type=Path), help="Folder to copy to.")
@click.option("--all", "fetch_all_videos", is_flag=True, help="All finished videos.")
@click.option("--name", metavar="PATTERN", help="Videos of jobs with this name, such as 'cup*'.")
@click.option("--since", metavar="TIME", help="Videos finished since then: 22:00, 2027-01-31, 12h.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each video, one a line.")
@storage_option
@redis_options
def fetch(
    job_ids: tuple[str, ...],
    folder: Path,
    fetch_all_videos: bool,
    name: str | None,
    since: str | None,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
) -> None:
    """Copy finished videos, and the JSON beside them, from the storage into a folder.

    Existing files are not copied again, so the same command can run every morning. A file gets its name only when it
    is complete. IDs may be shortened to their first characters.
    """
    from datetime import datetime
    from fnmatch import fnmatchcase

    from svdq.pipeline.errors import InputError
    from svdq.producer.results.fetch import fetch_all, results_of
    from svdq.producer.results.results import find_results
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.timeparse import parse_past

    if bool(job_ids) == bool(fetch_all_videos or name or since):
        raise InputError("Give either IDs of jobs or options that select videos: --all, --name, --since.")
    moment = parse_past(since, "--since", datetime.now().astimezone()) if since else None
    settings = Settings.load(redis_url=redis_url, storage=storage)
    place = Storage(settings.storage)
    if job_ids:
        results = results_of(settings, place, job_ids, warn)
    else:
        found = find_results(place, since=moment, on_bad=warn)
        results = [result for result in found if not name or fnmatchcase(result.name, name)]
    for fetched in fetch_all(place, results, folder):
        paths = [str(path) for path in fetched.paths]
        if as_json:
            echo(json.dumps({"id": fetched.job_id, "paths": paths, "copied": fetched.copied}))
        else:
            note = "" if fetched.copied else "  (exists already)"
            echo(f"{fetched.job_id}  {'  '.join(paths)}{note}")
    if not results and not as_json:
        echo("There are no finished videos to fetch.", err=True)


PRUNE_EXAMPLES = """\b
Examples:
  svdq prune --older-than 30d --dry-run
  svdq prune --older-than 30d
  svdq prune --older-than 8w --yes      in a crontab
"""


@click.command(epilog=PRUNE_EXAMPLES)
@click.option("--older-than", required=True, metavar="AGE", help="Minimum age, such as 12h, 30d or 8w.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@storage_option
@redis_options
def prune(older_than: str, dry_run: bool, yes: bool, storage: str | None, redis_url: str | None) -> None:
    """Remove old videos, photos that no job and no video refers to, and checkpoints that no job needs.

    Files of unfinished jobs are kept. Photos are kept for two days after they were last submitted.
    """
    import sys
    from datetime import datetime

    from svdq.pipeline.errors import InputError
    from svdq.producer.queue import session
    from svdq.producer.results.prune import find_removals, remove_all
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.timeparse import parse_age

    age = parse_age(older_than, "--older-than")
    if not (dry_run or yes or sys.stdin.isatty()):
        raise InputError("There is no terminal to ask on; give --yes to remove, or --dry-run to see what would go.")
    settings = Settings.load(redis_url=redis_url, storage=storage)
    place, home = Storage(settings.storage), Storage(str(settings.home))
    with session(settings) as connection:
        removals = find_removals(connection, place, home, age, datetime.now().astimezone(), warn)
        if not removals:
            echo("There is nothing to remove.")
            return
        if dry_run:
            for removal in removals:
                echo(f"{_size(removal.size):>10}  {'  '.join(map(removal.storage.location, removal.keys))}")
            echo(f"Would remove {_sum(removals)}.")
            return
        if not yes:
            click.confirm(f"Remove {_sum(removals)}?", abort=True)
        removed = remove_all(connection, removals)
    place.sweep()
    echo(f"Removed {_sum(removed)}.")
    if len(removed) < len(removals):
        echo(f"Kept, because a job uses them now: {len(removals) - len(removed)}.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def _sum(removals: "Sequence[Removal]") -> str:
    counts = {kind: sum(removal.kind == kind for removal in removals) for kind in ("video", "photo", "checkpoint")}
    words = [f"{number} {kind if number == 1 else f'{kind}s'}" for kind, number in counts.items() if number]
    files = sum(removal.num_files for removal in removals)
    size = _size(sum(removal.size for removal in removals))
    return f"{', '.join(words) or 'nothing'} ({files} files, {size})"
