"""`svdq gallery`: write an HTML page of the finished videos."""

from functools import partial
from pathlib import Path

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option

EXAMPLES = """\b
Examples:
  svdq gallery
  svdq gallery -o night.html --since 22:00
  svdq fetch --all --output videos && svdq gallery videos -o videos/index.html
  svdq gallery --embed --limit 20 -o to-send.html
"""
#: Largest number of failed jobs on the page; the newest are kept.
MAX_FAILURES = 1000


@click.command(epilog=EXAMPLES)
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", "page", type=click.Path(path_type=Path), default="gallery.html", show_default=True, help="Page."
)
@click.option("--since", metavar="TIME", help="Only jobs that ended since then: 22:00, 2027-01-31, 12h.")
@click.option("--limit", type=click.IntRange(min=1), help="Largest number of videos; the newest are kept.")
@click.option("--embed", is_flag=True, help="Embed the videos in the page, to send it as one file.")
@storage_option
@redis_options
def gallery(
    folder: Path | None,
    page: Path,
    since: str | None,
    limit: int | None,
    embed: bool,
    storage: str | None,
    redis_url: str | None,
) -> None:
    """Write an HTML page of the finished videos and of failed jobs with their reasons.

    The page opens from disk. Each video shows its first frame, and plays under the pointer or with keyboard focus. With
    a FOLDER, such as one that `svdq fetch` has filled, the page shows the videos in it, and Redis is not needed.
    """
    from datetime import datetime

    from svdq.pipeline.errors import InputError
    from svdq.producer.queue import session
    from svdq.producer.results.gallery import count, write_gallery
    from svdq.producer.results.pages import check_target
    from svdq.producer.results.results import OUTPUTS, find_results
    from svdq.producer.settings import Settings
    from svdq.producer.status.status import list_jobs
    from svdq.producer.storage.storage import Storage
    from svdq.producer.timeparse import parse_past

    moment = parse_past(since, "--since", datetime.now().astimezone()) if since else None
    check_target(page)
    failures = []
    if folder is not None:
        folder = folder.absolute()
        if not folder.is_dir():
            raise InputError(f"There is no folder {str(folder)!r}; give a folder with videos, or none for the storage.")
        place, under = Storage(str(folder.parent)), folder.name
    else:
        settings = Settings.load(redis_url=redis_url, storage=storage)
        place, under = Storage(settings.storage), OUTPUTS
        with session(settings) as connection:
            failures = list_jobs(connection, MAX_FAILURES, ("failed",))
        failures = [view for view in failures if moment is None or view.created_at >= moment]
    results = sorted(
        find_results(place, since=moment, folder=under, on_bad=partial(echo, err=True)),
        key=lambda result: result.finished_at,
        reverse=True,
    )[:limit]
    write_gallery(page, place, results, failures, title=f"svdq: {folder or place.shown}", embed=embed)
    echo(f"{page}  {count(len(results), 'video')}, {count(len(failures), 'failure')}")
