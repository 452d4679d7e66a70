"""`svdq status`, `list`, `logs` and `report`: show jobs, queues and ranks, and summarize a run."""

import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import describe, echo, echo_json, outage_of
from svdq.cli.main import connect, json_option, redis_options, storage_option
from svdq.cli.option_types import PastTime, selection_options, since_option
from svdq.pipeline.errors import InputError

if TYPE_CHECKING:
    import redis

    from svdq.producer.status.job_log import LogEntry
    from svdq.producer.status.selection import Selection
import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis
    from rich.console import Console

    from svdq.producer.status.snapshot import Snapshot

#: Seconds between polls for new log entries.
POLL_S = 0.5
#: Seconds after the end of a job in which its last log entries may still arrive.
LAST_ENTRIES_S = 3.0


@click.command()
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@json_option("ID")
@redis_options
def status(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Show jobs: status, step, estimated end, files and, as JSON, all parameters.

    Without an ID: when all jobs will be done, the number of jobs by queue and status, and for each group its ranks and
    its jobs in flight. `svdq top` shows the same, live.

    \b
    Examples:
      svdq status                 queues, workers and jobs in flight
      svdq status 1f0c            one job, by the first characters of its id
      svdq status 1f0c --json     every parameter as used
    """
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.job_view import view
    from svdq.producer.status.selection import complete_ids
    from svdq.producer.status.snapshot import estimate

    with connect(redis_url=redis_url) as connection:
        if not job_ids:
            print_snapshot(connection, as_json)
            return
        jobs = [view(connection, job_id) for job_id in complete_ids(connection, job_ids)]
        estimates = estimate(connection, jobs)
    for job in jobs:
        expected = estimates.get(job.id, Estimate())
        if as_json:
            echo_json(job.as_json() | expected.as_json())
        else:
            echo(describe(job, expected, whole_prompt=True))


def print_snapshot(connection: "redis.Redis", as_json: bool) -> None:
    """Print the state of all queues, ranks and videos in flight."""
    from svdq.producer.status.snapshot import take

    snapshot = take(connection)
    if as_json:
        echo_json(snapshot.as_json())
    else:
        from svdq.cli.view import lines_of

        echo(*lines_of(snapshot))


@click.command("list")
@click.option("--limit", type=click.IntRange(1, 10**9), default=50, show_default=True, help="Largest number of jobs.")
@click.option("--offset", type=click.IntRange(0, 10**9), default=0, help="Newer jobs to leave out: the next page.")
@selection_options()
@json_option("job")
@redis_options
def list_jobs(limit: int, offset: int, selection: "Selection", as_json: bool, redis_url: str | None) -> None:
    """List the newest jobs of all queues, newest first; with IDs, which may be shortened, these jobs.

    \b
    Examples:
      svdq list
      svdq list --status failed --limit 10
      svdq list --name 'cup*' --since 22:00
      svdq list --offset 50                      the next page
      svdq list --json | jq -r '.outputs[]'
    """
    from svdq.producer.status.selection import list_jobs as newest_jobs
    from svdq.producer.status.selection import select

    with connect(redis_url=redis_url) as connection:
        if selection.job_ids or selection.name or selection.since:
            jobs = select(connection, selection)
            jobs = (jobs if selection.job_ids else jobs[::-1])[offset : offset + limit]
        else:  # without reading all of them
            jobs = newest_jobs(connection, limit, selection.statuses, offset=offset)
    for job in jobs:
        echo_json(job.as_json()) if as_json else echo(describe(job))
    if not jobs and not as_json:
        some = "such " if selection.statuses or selection.name or selection.since else "more " if offset else ""
        echo(f"There are no {some}jobs; add one with `svdq submit PHOTO`.", err=True)


@click.command()
@click.argument("job_id", metavar="ID")
@click.option(
    "--follow", "-f", is_flag=True, help="Print new entries until the job has ended, also across restarts of Redis."
)
@json_option("entry")
@redis_options
def logs(job_id: str, follow: bool, as_json: bool, redis_url: str | None) -> None:
    """Show what workers logged about a job, oldest first.

    The log is kept as long as the job. Of a long log only the newest part is kept.

    \b
    Examples:
      svdq logs 1f0c
      svdq logs 1f0c --follow
      svdq logs 1f0c --json
    """
    from svdq.producer.status.selection import complete_ids
    from svdq.producer.text import rfc3339

    with connect(redis_url=redis_url) as connection:
        [job_id] = complete_ids(connection, [job_id])
        is_empty = True
        for entry in _entries(connection, job_id, follow):
            is_empty = False
            if as_json:
                echo_json(entry.model_dump(mode="json") | {"at": rfc3339(entry.at)})
            else:
                echo(*_lines(entry))
            sys.stdout.flush()
    if is_empty and not as_json:
        echo(f"No worker has logged anything about job {job_id} yet.", err=True)


def _entries(connection: "redis.Redis", job_id: str, follow: bool) -> "Iterator[LogEntry]":
    """Yield the present entries and, with `follow`, new ones until the job has ended, also after an outage of Redis."""
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.status.job_log import read
    from svdq.producer.status.job_view import view

    last: LogEntry | None = None
    ended_at: float | None = None
    is_away = False
    while True:
        try:
            entries = read(connection, job_id)
            is_away = False
            # The log was truncated, so the last entry shown is gone: all entries are new.
            yield from entries[entries.index(last) + 1 :] if last in entries else entries
            last = entries[-1] if entries else last
            if not follow or (ended_at is not None and time.monotonic() - ended_at > LAST_ENTRIES_S):
                return
            if ended_at is None and view(connection, job_id).ended:
                ended_at = time.monotonic()
        except (LostError, SlowError):
            if not follow:
                raise
            if not is_away:
                echo(outage_of(time.time()), err=True)
            is_away = True
        time.sleep(POLL_S)


def _lines(entry: "LogEntry") -> list[str]:
    first, *more = entry.text.splitlines() or [""]
    head = f"{entry.at.astimezone():%Y-%m-%d %H:%M:%S}  {entry.host} rank {entry.rank}  {entry.level}  {first}"
    return [head, *(f"    {line}" for line in more)]


@click.command()
@since_option("What happened", default="24h")
@click.option("--until", metavar="TIME", type=PastTime(), help="End, in the same formats [default: now].")
@json_option()
@storage_option
@redis_options
def report(since: datetime, until: datetime | None, as_json: bool, storage: str | None, redis_url: str | None) -> None:
    """Summarize a period: finished videos, pace, failures with their reasons, and what is left.

    The figures come from Redis and from the JSON beside the videos, which outlives the jobs in Redis.

    \b
    Examples:
      svdq report --since 22:00
      svdq report --since 2027-01-30T22:00 --until 2027-01-31T06:00
      svdq report --since 7d --json
    """
    from svdq.producer.queue import session
    from svdq.producer.results.run_report import jobs_left, records_from_redis, records_from_storage, summarize
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.storage.storage import Storage

    until = until or datetime.now().astimezone()
    if until <= since:
        raise InputError(
            f"--until {until:%Y-%m-%d %H:%M} is not after --since {since:%Y-%m-%d %H:%M}; give a later time."
        )
    settings = load_settings(redis_url=redis_url, storage=storage)
    warn = partial(echo, err=True)
    with session(settings) as connection:
        records = [
            *records_from_redis(connection, since, until, warn),
            *records_from_storage(Storage(settings.storage), since, warn),
        ]
        left = jobs_left(connection)
    found = summarize(records, left, since=since, until=until)
    echo_json(found.as_json()) if as_json else echo(*found.lines())


#: Seconds between two refreshes; ranks report about once a second.
INTERVAL_S = 1.0


@click.command()
@json_option()
@redis_options
def top(as_json: bool, redis_url: str | None) -> None:
    """Watch the queues, every rank, and the videos in flight as they move through the ranks.

    It runs until you press q or Ctrl-C. With --json or without a terminal it prints the state once, as `svdq status`.

    \b
    Examples:
      svdq top
    """
    from rich.console import Console

    console = Console()
    with connect(redis_url=redis_url) as connection:
        if as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
            print_snapshot(connection, as_json)
        else:
            _show(connection, console)


def _show(connection: "redis.Redis", console: "Console") -> None:
    """Draw on the terminal until the user quits."""
    from rich.live import Live

    from svdq.cli.view import draw

    # Treated like Ctrl-C, so that the terminal is restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Suspending would leave the shell on our screen.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    with _keys() as is_quit_within, Live(console=console, screen=True, auto_refresh=False) as live:
        for snapshot, outage in _snapshots(connection):
            live.update(draw(snapshot, console.options, outage=outage, is_live=True), refresh=True)
            if is_quit_within(INTERVAL_S):
                return


def _snapshots(connection: "redis.Redis") -> "Iterator[tuple[Snapshot, str]]":
    """Yield snapshots without end; while Redis does not answer, the last one and a sentence that says so.

    Raises:
        UnavailableError: Redis does not answer the first time.
    """
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.status.snapshot import take

    snapshot, outage = take(connection), ""
    while True:
        yield snapshot, outage
        try:
            snapshot, outage = take(connection), ""
        except (LostError, SlowError):
            outage = outage_of(snapshot.at)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal, without echo.

    Yields:
        A function that waits some seconds for a key and returns whether the key is q; any other key ends the wait.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])  # sleeps
        return
    import termios
    import tty

    fd = sys.stdin.fileno()

    def is_quit_within(seconds: float) -> bool:
        if not select.select([fd], [], [], seconds)[0]:
            return False
        pressed = os.read(fd, 1024)
        # Several keys may have arrived at once; a sequence that begins with an escape is one key, such as an arrow.
        # No key at all means that the terminal is gone.
        return not pressed or (not pressed.startswith(b"\x1b") and b"q" in pressed.lower())

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield is_quit_within
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
