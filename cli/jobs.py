"""`svdq status`, `list` and `logs`: show jobs, queues and ranks."""

import sys
import time
from collections.abc import Iterator

import click
import redis

from svdq.cli.formatting import describe, echo, echo_json, outage_of
from svdq.cli.option_types import json_option, selection_options, with_connection
from svdq.cli.view import lines_of
from svdq.producer.job_log import LogEntry, read_log
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import read_several_owners
from svdq.producer.status.selection import Selection, complete_ids, select
from svdq.producer.status.selection import list_jobs as newest_jobs
from svdq.producer.status.snapshot import estimate, take
from svdq.producer.text import rfc3339
from svdq.producer.together import ask_one

POLL_S = 0.5  # seconds between polls for new log entries
LAST_ENTRIES_S = 3.0  # seconds after the end of a job in which its last log entries may still arrive


@click.command()
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@json_option("ID")
@with_connection
def status(connection: redis.Redis, job_ids: tuple[str, ...], as_json: bool) -> None:
    """Show jobs: status, step, estimated end, files and, as JSON, all parameters.

    Without an ID: when all jobs will be done, the number of jobs by queue and status, and for each group its ranks and
    its jobs in flight. `svdq top` shows the same, live.

    \b
    Examples:
      svdq status                 queues, workers and jobs in flight
      svdq status 1f0c            one job, by the first characters of its id
      svdq status 1f0c --json     every parameter as used
    """
    if not job_ids:
        print_snapshot(connection, as_json)
        return
    jobs = [view(connection, job_id) for job_id in complete_ids(connection, job_ids)]
    estimates, has_several = estimate(connection, jobs), ask_one(connection, read_several_owners())
    for job in jobs:
        expected = estimates.get(job.id, Estimate())
        text = describe(job, expected, whole_prompt=True, with_owner=has_several)
        echo_json(job.as_json() | expected.as_json()) if as_json else echo(text)


def print_snapshot(connection: redis.Redis, as_json: bool) -> None:
    """Print the state of all queues, ranks and videos in flight."""
    snapshot = take(connection)
    echo_json(snapshot.as_json()) if as_json else echo(*lines_of(snapshot))


@click.command("list")
@click.option("--limit", type=click.IntRange(1, 10**9), default=50, show_default=True, help="Largest number of jobs.")
@selection_options()
@json_option("job")
@with_connection
def list_jobs(connection: redis.Redis, limit: int, selection: Selection, as_json: bool) -> None:
    """List the newest jobs of all queues, newest first; with IDs, which may be shortened, these jobs.

    With `--status queued` alone, the jobs are in the order in which workers take them.

    \b
    Examples:
      svdq list --status failed --limit 10
      svdq list --status queued
      svdq list --name 'cup*' --since 22:00
      svdq list --json | jq -r '.outputs[]'
    """
    if selection.job_ids or selection.name or selection.owners or selection.since:
        jobs = select(connection, selection)
        jobs = (jobs if selection.job_ids else jobs[::-1])[:limit]
    else:  # without reading all of them
        jobs = newest_jobs(connection, limit, selection.statuses)
    have_several = len({job.owner for job in jobs}) > 1
    for job in jobs:
        echo_json(job.as_json()) if as_json else echo(describe(job, with_owner=have_several))
    if not jobs and not as_json:
        some = "such " if selection.statuses or selection.name or selection.owners or selection.since else ""
        echo(f"There are no {some}jobs; add one with `svdq submit PHOTO`.", err=True)


@click.command()
@click.argument("job_id", metavar="ID")
@click.option(
    "--follow", "-f", is_flag=True, help="Print new entries until the job has ended, also across restarts of Redis."
)
@json_option("entry")
@with_connection
def logs(connection: redis.Redis, job_id: str, follow: bool, as_json: bool) -> None:
    """Show what workers logged about a job, oldest first.

    The log is kept as long as the job; if it is long, only its newest part.

    \b
    Examples:
      svdq logs 1f0c --follow
    """
    [job_id] = complete_ids(connection, [job_id])
    is_empty = True
    for entry in _entries(connection, job_id, follow):
        is_empty = False
        echo_json(entry.model_dump(mode="json") | {"at": rfc3339(entry.at)}) if as_json else echo(*_lines(entry))
        sys.stdout.flush()
    if is_empty and not as_json:
        echo(f"No worker has logged anything about job {job_id} yet.", err=True)


def _entries(connection: redis.Redis, job_id: str, follow: bool) -> Iterator[LogEntry]:
    """Yield the present entries and, with `follow`, new ones until the job has ended, also after an outage of Redis."""
    last: LogEntry | None = None
    ended_at: float | None = None
    is_away = False
    while True:
        try:
            entries = read_log(connection, job_id)
            is_away = False
            # The log was truncated, so the last entry shown is gone: all entries are new.
            yield from entries[entries.index(last) + 1 :] if last in entries else entries
            last = entries[-1] if entries else last
            if not follow or (ended_at is not None and time.monotonic() - ended_at > LAST_ENTRIES_S):
                return
            if ended_at is None and view(connection, job_id).ended:
                ended_at = time.monotonic()
        except (redis.ConnectionError, redis.TimeoutError):
            if not follow:
                raise
            if not is_away:
                echo(outage_of(time.time()), err=True)
            is_away = True
        time.sleep(POLL_S)


def _lines(entry: LogEntry) -> list[str]:
    first, *more = entry.text.splitlines() or [""]
    head = f"{entry.at.astimezone():%Y-%m-%d %H:%M:%S}  {entry.host} rank {entry.rank}  {entry.level}  {first}"
    return [head, *(f"    {line}" for line in more)]
