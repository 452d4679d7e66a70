"""`svdq logs`: show what workers on all hosts logged about a job."""

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options

if TYPE_CHECKING:
    import redis

    from svdq.producer.status.job_log import LogEntry

#: Seconds between polls for new entries.
POLL_S = 0.5
#: Seconds after the end of a job in which its last entries may still arrive.
LAST_WORDS_S = 3.0


EXAMPLES = """\b
Examples:
  svdq logs 1f0c…
  svdq logs 1f0c… --follow
  svdq logs 1f0c… --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("job_id", metavar="ID")
@click.option("--follow", "-f", is_flag=True, help="Print new entries until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each entry, one a line.")
@redis_options
def logs(job_id: str, follow: bool, as_json: bool, redis_url: str | None) -> None:
    """Show what workers logged about a job, oldest first.

    The log is kept as long as the job. Of a long log only the newest part is kept.
    """
    from svdq.producer.queue import session
    from svdq.producer.selection import complete_ids
    from svdq.producer.settings import Settings
    from svdq.producer.timeparse import rfc3339

    with session(Settings.load(redis_url=redis_url)) as connection:
        [job_id] = complete_ids(connection, [job_id])
        is_empty = True
        for entry in _entries(connection, job_id, follow):
            is_empty = False
            if as_json:
                echo(json.dumps(entry.model_dump(mode="json") | {"at": rfc3339(entry.at)}))
            else:
                for line in _lines(entry):
                    echo(line)
            sys.stdout.flush()
    if is_empty and not as_json:
        echo(f"No worker has logged anything about job {job_id} yet.", err=True)


def _entries(connection: "redis.Redis", job_id: str, follow: bool) -> "Iterator[LogEntry]":
    """Yield the present entries and, with `follow`, new ones until the job has ended."""
    from svdq.producer.status.job_log import read
    from svdq.producer.status.status import view

    last: LogEntry | None = None
    ended_at: float | None = None
    while True:
        entries = read(connection, job_id)
        # The log was truncated, so the last entry shown is gone: all entries are new.
        yield from entries[entries.index(last) + 1 :] if last in entries else entries
        last = entries[-1] if entries else last
        if not follow or (ended_at is not None and time.monotonic() - ended_at > LAST_WORDS_S):
            return
        if ended_at is None and view(connection, job_id).ended:
            ended_at = time.monotonic()
        time.sleep(POLL_S)


def _lines(entry: "LogEntry") -> list[str]:
    first, *more = entry.text.splitlines() or [""]
    head = f"{entry.at.astimezone():%Y-%m-%d %H:%M:%S}  {entry.host} rank {entry.rank}  {entry.level}  {first}"
    return [head, *(f"    {line}" for line in more)]
