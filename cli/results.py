"""`svdq report`, `gallery`, `fetch`, `inspect`, `prune` and `remove`: what becomes of finished videos."""

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import click
from rich.filesize import decimal

from svdq.cli.formatting import echo, echo_json, table, words
from svdq.cli.option_types import (
    MANY,
    GivenPath,
    OutputFile,
    amount_options,
    ids_of_jobs,
    json_option,
    past_time,
    selection_options,
    since_option,
    with_settings,
)
from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import InputError
from svdq.producer.connection import clock_of, session
from svdq.producer.job import shown_loras
from svdq.producer.queue import statuses
from svdq.producer.records import Sidecar
from svdq.producer.results.fetch import fetch_all, ids_of, results_of
from svdq.producer.results.finished_videos import find_results, read_provenance
from svdq.producer.results.gallery import write_gallery
from svdq.producer.results.prune import Removal, check_clock, find_removals, remove_all
from svdq.producer.results.remove import check_removable, remove_job, remove_video
from svdq.producer.results.run_report import jobs_left, records_from_redis, records_from_storage, summarize
from svdq.producer.settings import Settings
from svdq.producer.status.selection import Selection, list_jobs, owners_of
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count, parse_duration
from svdq.producer.verdicts import ids_with_verdict, record_verdict

warn = partial(echo, err=True)


@click.command()
@since_option("What happened", default="24h")
@click.option("--until", metavar="TIME", callback=past_time, help="End, in the same formats [default: now].")
@json_option()
@with_settings
def report(settings: Settings, since: datetime, until: datetime | None, as_json: bool) -> None:
    """Summarize a period: finished videos, pace, failures with their reasons, and what is left.

    The figures come from Redis and from the JSON beside the videos, which outlives the jobs in Redis.

    \b
    Examples:
      svdq report --since 22:00
      svdq report --since 2027-01-30T22:00 --until 2027-01-31T06:00 --json
    """
    if until and until <= since:
        raise InputError(
            f"--until {until:%Y-%m-%d %H:%M} is not after --since {since:%Y-%m-%d %H:%M}; give a later time."
        )
    with session(settings) as connection:
        until = until or clock_of(connection)
        records = [
            *records_from_redis(connection, since, until, warn),
            *records_from_storage(Storage.open_for_command(settings.storage), since, warn),
        ]
        left = jobs_left(connection)
    found = summarize(records, left, since=since, until=until)
    echo_json(found.as_json()) if as_json else echo(*found.lines())


@click.command()
@click.argument("folder", metavar="[FOLDER]", required=False, type=GivenPath())
@click.option(
    "--output", "-o", "page", type=OutputFile(".html"), default="gallery.html", show_default=True, help="Page."
)
@since_option("Only jobs that ended")
@click.option("--limit", type=click.IntRange(min=1), help="Largest number of videos; the newest are kept.")
@json_option()
@with_settings
def gallery(
    settings: Settings, folder: Path | None, page: Path, since: datetime | None, limit: int | None, as_json: bool
) -> None:
    """Write an HTML page of the finished videos and of failed jobs with their reasons.

    The page opens from disk. Each video shows its first frame, and plays under the pointer or with keyboard focus. With
    a FOLDER, such as one that `svdq fetch` has filled, the page shows the videos in it, and Redis is not needed.

    \b
    Examples:
      svdq gallery -o night.html --since 22:00
      svdq fetch --all --output videos && svdq gallery videos -o videos/index.html
    """
    failures = []
    if folder is not None:
        folder = Path(os.path.abspath(folder))  # without `..`, which is no key of a storage
        if not folder.is_dir():
            raise InputError(f"There is no folder {str(folder)!r}; give a folder with videos, or none for the storage.")
        place = Storage(str(folder.parent))
    else:
        place = Storage.open_for_command(settings.storage)
        with session(settings) as connection:
            failures = list_jobs(connection, 1000, ("failed",))
        failures = [view for view in failures if since is None or (view.ended_at or view.created_at) >= since]
    found = find_results(place, since=since, fetched=folder.name if folder else None, on_bad=warn)
    results = sorted(found, key=lambda result: result.finished_at, reverse=True)[:limit]
    write_gallery(page, place, results, failures, title=f"svdq: {folder or place.shown}")
    if as_json:
        echo_json({"page": str(page), "videos": len(results), "failures": len(failures)})
    else:
        echo(f"{page}  {count(len(results), 'video')}, {count(len(failures), 'failure')}")


def _given(context: click.Context, option: click.Parameter, value: str) -> str:
    GivenPath().convert(value, option, context)
    return value


@click.command()
@selection_options("all", since="Jobs finished")
@click.option(
    "--output",
    "-o",
    required=True,
    metavar="FOLDER|TEMPLATE",
    callback=_given,
    help="Folder to copy to, or with the names of the files, such as 'videos/{folder}/{photo}-{seed}'.",
)
@amount_options("videos")
@json_option("video")
@with_settings
def fetch(settings: Settings, selection: Selection, output: str, verbose: bool, as_json: bool) -> None:
    """Copy finished videos, and the JSON beside them, from the storage into a folder.

    Existing files are not copied again, so the same command can run every morning. A file gets its name only when it
    is complete. IDs may be shortened to their first characters.

    A template has the fields of `svdq submit --output`, without {n} and {variation}; {date} is the day of the
    render. If another file has the name, the copy gets a number. Videos keep their folders of the storage unless
    the template has {folder}.

    \b
    Examples:
      svdq fetch --name 'cup*' --output videos
      svdq fetch --since 22:00 --output videos
      svdq fetch --all --output videos --storage s3://bucket/prefix
      svdq fetch --since 22:00 --output 'videos/{date}/{photo}-{seed}'
    """
    selection = selection.among(("finished",))
    place = Storage.open_for_command(settings.storage)
    if selection.job_ids:
        results = results_of(settings, place, selection.job_ids, warn)
    else:
        found = find_results(place, since=selection.since, on_bad=warn)
        results = [result for result in found if selection.matches_name(result.document.name)]
        if selection.owners:
            with session(settings) as connection:  # sidecars of earlier versions do not name them
                known = owners_of(connection, [result.job_id for result in results])
            owners = (
                each.document.owner if owner is None else owner for each, owner in zip(results, known, strict=True)
            )
            results = [each for each, owner in zip(results, owners, strict=True) if owner in selection.owners]
    is_bulk = len(results) >= MANY
    sizes = []
    for fetched in fetch_all(place, results, output):
        sizes.append(fetched.copied)
        paths = [str(path) for path in fetched.paths]
        if as_json:
            echo_json({"id": fetched.job_id, "paths": paths, "copied": fetched.copied})
        elif verbose or not is_bulk:
            note = "" if fetched.copied else "  (exists already)"
            echo(f"{fetched.job_id}  {'  '.join(paths)}{note}")
    if is_bulk and not as_json:
        num_new = len([size for size in sizes if size])
        text = f"{count(num_new, 'video')} ({decimal(sum(sizes))}); existing: {len(sizes) - num_new:,}."
        echo(f"Copied to {output}: {text}")
    if not results and not as_json:
        echo("There are no finished videos to fetch.", err=True)


@click.command()
@click.option("--older-than", required=True, metavar="AGE", help="Minimum age, such as 12h, 30d or 8w.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("removal")
@with_settings
def prune(settings: Settings, older_than: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove old videos, photos that no job and no video refers to, and checkpoints that no job needs.

    Files of unfinished jobs, videos that are marked to keep, their upscaled copies, and videos in other folders than
    those of their jobs stay. Photos are kept for two days after they were last submitted.

    \b
    Examples:
      svdq prune --older-than 30d --dry-run
      svdq prune --older-than 8w --yes      without asking
    """
    age = parse_duration(older_than, "--older-than")
    if not (dry_run or yes or sys.stdin.isatty()):
        raise InputError("There is no terminal to ask on; give --yes to remove, or --dry-run to see what would go.")
    place, home = Storage.open_for_command(settings.storage), Storage(str(settings.home))
    with session(settings) as connection:
        removals = find_removals(connection, place, home, age, check_clock(connection), warn)
        if not removals and not as_json:
            echo("There is nothing to remove.")
            return
        if dry_run and as_json:
            _print_json(removals)
            return
        if dry_run:
            for removal in removals:
                echo(f"{decimal(removal.size):>10}  {'  '.join(map(removal.storage.location, removal.keys))}")
            echo(f"Would remove {_sum(removals)}.")
            return
        if not yes:
            click.confirm(f"Remove {_sum(removals)}?", abort=True, err=as_json)
        removed = remove_all(connection, removals)
    place.sweep()
    if as_json:
        _print_json(removed)
        return
    echo(f"Removed {_sum(removed)}.")
    if len(removed) < len(removals):
        echo(f"Kept, because a job uses them now: {len(removals) - len(removed):,}.")


@click.command()
@click.argument("job_ids", metavar="[ID]...", nargs=-1, shell_complete=ids_of_jobs)
@click.option("--rejected", is_flag=True, help="All videos that are marked to reject.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("job")
@with_settings
def remove(settings: Settings, job_ids: Sequence[str], rejected: bool, yes: bool, as_json: bool) -> int:
    """Remove finished videos with their files, and the records of jobs that have ended.

    Photos stay, and the same submission renders the video again. If one of the jobs has not ended, or is to be
    kept, nothing is removed. IDs may be shortened to their first characters, even if Redis has forgotten them.

    \b
    Examples:
      svdq remove 1f0c 2a7d
      svdq remove --rejected --yes
    """
    if bool(job_ids) == rejected:
        raise InputError("Give either IDs of jobs, or --rejected.")
    if not (yes or sys.stdin.isatty()):
        raise InputError("There is no terminal to ask on; give --yes to remove.")
    place, home = Storage.open_for_command(settings.storage), Storage(str(settings.home))
    with session(settings) as connection:
        ids = sorted(ids_with_verdict(connection, "reject")) if rejected else ids_of(connection, place, job_ids)
        if not ids:
            echo("There is nothing to remove.", err=True)
            return 0
        known = statuses(connection, ids)
        forgotten = frozenset(job_id for job_id, status in zip(ids, known, strict=True) if status is None)
        results = list(find_results(place, job_ids=forgotten, on_bad=warn)) if forgotten else []
        check_removable(connection, ids, results)
        if not yes:
            click.confirm(f"Remove {count(len(ids), 'job')} and the videos?", abort=True, err=as_json)
            check_removable(connection, ids, results)
        for job_id in dict.fromkeys(result.job_id for result in results):
            remove_video(connection, place, [result for result in results if result.job_id == job_id])
        record_verdict(connection, list(forgotten), None)
        for job_id in ids:
            if job_id not in forgotten:
                remove_job(connection, place, home, job_id)
            echo_json({"id": job_id, "outcome": "removed"}) if as_json else echo(f"{job_id}  removed")
    return 0


def _print_json(removals: Sequence[Removal]) -> None:
    for removal in removals:
        files = list(map(removal.storage.location, removal.keys))
        echo_json({"kind": removal.kind, "id": removal.job_id or None, "bytes": removal.size, "paths": files})


def _sum(removals: Sequence[Removal]) -> str:
    numbers = {kind: sum(removal.kind == kind for removal in removals) for kind in ("video", "photo", "checkpoint")}
    parts = [count(number, kind) for kind, number in numbers.items() if number]
    num_files = sum(removal.num_files for removal in removals)
    size = decimal(sum(removal.size for removal in removals))
    return f"{', '.join(parts) or 'nothing'} ({count(num_files, 'file')}, {size})"


@click.command()
@click.argument("file", type=GivenPath())
@json_option()
def inspect(file: Path, as_json: bool) -> None:
    """Show how a video was made: an mp4, gif, webp or png, a folder of png frames, or the .json beside them.

    \b
    Examples:
      svdq inspect video.mp4 --json
    """
    record = read_provenance(file)
    if as_json:
        echo_json(record.as_json())
        return
    echo(*table(_rows(record)), "")
    last = " --last PHOTO" if "last_image" in record.job else ""
    like = f"{svdq_command('submit', options=('--like', str(file)))} PHOTO{last}"
    echo(f"{like}   makes another video with the same parameters and seed")


def _rows(record: Sidecar) -> list[tuple[str, object]]:
    model, notice = record.model.name or "?", record.model.notice
    rows: list[tuple[str, object]] = [("made by", f"svdq {record.svdq}"), ("job", record.job_id or "?")]
    rows.append(("model", f"{model}{notice and ', '}{notice}"))
    rows += [(f"model {name}", words(value)) for name, value in (record.model.model_extra or {}).items()]
    if record.source:
        rows.append(("photo", record.source))
    job = record.job | ({"decode_chunk_size": "all"} if record.job.get("decode_chunk_size", 1) is None else {})
    rows += [(name, shown_loras(value) if name == "loras" else words(value)) for name, value in job.items()]
    rows += [(f"upscaled {name}", words(value)) for name, value in record.upscaled.items()]
    rows += [(f"compute {name}", words(value)) for name, value in record.model.compute.items()]
    rows += [(f"seconds {name}", words(value)) for name, value in record.seconds.items()]
    rows += [(f"memory {name}", decimal(value)) for name, value in record.memory_bytes.items()]
    rows += [(f"versions {name}", words(value)) for name, value in record.versions.items()]
    return rows
