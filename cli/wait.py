"""`svdq wait`, and the waiting of `svdq submit --wait`: bars on a terminal, else a line for each job that ends."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import click

from svdq.cli.main import EXIT_FAILED, redis_options
from svdq.cli.words import describe, with_notice

if TYPE_CHECKING:
    import redis

    from svdq.producer.settings import Settings
    from svdq.producer.status import JobView

POLL_S = 0.3
#: Seconds that Redis may be away, for a restart, before waiting gives up.
PATIENCE_S = 30.0
#: Seconds without a worker before we say so.
NO_WORKER_S = 2.0
#: More bars than this do not fit a terminal; further jobs show as they start.
MAX_BARS = 20


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line.")
@redis_options
def wait(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> int:
    """Wait for jobs and print where their videos are.

    Exit code 0 when all are finished, 1 when any has failed.
    """
    from svdq.producer.settings import Settings

    views, exit_code = wait_for(Settings.load(redis_url=redis_url), job_ids, quiet=as_json)
    if as_json:
        for view in views:
            click.echo(json.dumps(view.as_json()))
    return exit_code


def wait_for(settings: "Settings", job_ids: Sequence[str], *, quiet: bool) -> "tuple[list[JobView], int]":
    """Wait until all jobs have ended; return them in the order asked for, and the exit code that tells how."""
    from svdq.producer.queue import session

    job_ids = list(dict.fromkeys(job_ids))
    live = sys.stderr.isatty() and not quiet
    with session(settings) as connection:
        display: Display = Bars(len(job_ids)) if live else Lines()
        ended: dict[str, JobView] = {}
        with display:
            for views in _poll(connection, job_ids):
                for view in views:
                    display.show(view)
                    if view.ended:
                        ended[view.id] = view
                        if not live and not quiet:
                            click.echo(describe(view))
                            sys.stdout.flush()
    # Only now that the bars are gone: stdout may be the same terminal.
    if live:
        for view in ended.values():
            click.echo(describe(view))
    exit_code = 0 if all(view.status == "finished" for view in ended.values()) else EXIT_FAILED
    return [ended[job_id] for job_id in job_ids], exit_code


def _poll(connection: "redis.Redis", job_ids: Sequence[str]) -> "Iterator[list[JobView]]":
    """Yield how the jobs stand that have not ended before, again and again until all have."""
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.queue import fetch
    from svdq.producer.status import view_many, view_workers

    pending = set(job_ids)
    started = last_answer = time.monotonic()
    told = False
    while True:
        try:
            views = view_many(connection, pending)
            for gone in pending - {view.id for view in views}:
                fetch(connection, gone)  # tells that there is no such job
            if not told and time.monotonic() - started > NO_WORKER_S:
                told = True
                if not view_workers(connection):
                    click.echo("No worker is running; start one with `svdq worker`.", err=True)
        except (LostError, SlowError):
            if time.monotonic() - last_answer > PATIENCE_S:
                raise
        else:
            last_answer = time.monotonic()
            yield views
            pending -= {view.id for view in views if view.ended}
            if not pending:
                return
        time.sleep(POLL_S)


class Display(Protocol):
    """Where progress is shown."""

    def __enter__(self) -> object:
        """Begin to show."""
        ...

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was."""
        ...

    def show(self, view: "JobView") -> None:
        """Show how a job stands."""
        ...


class Lines:
    """No progress: stderr is not a terminal."""

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def show(self, view: "JobView") -> None:
        """Nothing to show before a job has ended."""


class Bars:
    """A bar for each job in flight, and one for all of them when they are several; on stderr."""

    def __init__(self, num_jobs: int) -> None:
        # Imported here: rich is only needed on a terminal.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()
        self._all = self._progress.add_task("all", total=num_jobs) if num_jobs > 1 else None

    def __enter__(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        """Clear the bars."""
        self._progress.stop()

    def show(self, view: "JobView") -> None:
        """Move the bar of a job; take it away when the job has ended."""
        if view.ended:
            self._ended.add(view.id)
            if (task := self._tasks.pop(view.id, None)) is not None:
                self._progress.remove_task(task)
            if self._all is not None:
                self._progress.update(self._all, completed=len(self._ended))
            return
        if view.id not in self._tasks:
            if len(self._tasks) >= MAX_BARS:
                return
            self._tasks[view.id] = self._progress.add_task("", total=view.steps or None)
        text = f"{view.name}  {with_notice(view.status, view)}"
        self._progress.update(self._tasks[view.id], completed=view.step, description=text)
