"""`svdq status` and `svdq list`: show jobs, queues and workers."""

import json

import click

from svdq.cli.formatting import describe, echo
from svdq.cli.main import redis_options
from svdq.producer.keys import STATUSES

STATUS_EXAMPLES = """\b
Examples:
  svdq status                 queues, workers and jobs in flight
  svdq status 1f0c            one job, by the first characters of its id
  svdq status 1f0c --json     every parameter as used
"""


@click.command(epilog=STATUS_EXAMPLES)
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, or one for each ID, one a line.")
@redis_options
def status(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Show jobs: status, step, estimated end, files and, as JSON, all parameters.

    Without an ID: when all jobs will be done, the number of jobs by queue and status, and for each group its ranks and
    its jobs in flight. `svdq top` shows the same, live.
    """
    from svdq.producer.queue import session
    from svdq.producer.selection import complete_ids
    from svdq.producer.settings import Settings
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.snapshot import estimate, take
    from svdq.producer.status.status import view

    with session(Settings.load(redis_url=redis_url)) as connection:
        if not job_ids:
            from svdq.cli.view import lines_of

            snapshot = take(connection)
            for line in [json.dumps(snapshot.as_json())] if as_json else lines_of(snapshot):
                echo(line)
            return
        jobs = [view(connection, job_id) for job_id in complete_ids(connection, job_ids)]
        estimates = estimate(connection, jobs)
    for job in jobs:
        expected = estimates.get(job.id, Estimate())
        echo(json.dumps(job.as_json() | expected.as_json()) if as_json else describe(job, expected))


LIST_EXAMPLES = """\b
Examples:
  svdq list
  svdq list --status failed --limit 10
  svdq list --offset 50                      the next page
  svdq list --json | jq -r '.outputs[]'
"""


@click.command("list", epilog=LIST_EXAMPLES)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Largest number of jobs.")
@click.option("--offset", type=click.IntRange(min=0), default=0, help="Leave out this many newer jobs: the next page.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only this status; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line.")
@redis_options
def list_jobs(limit: int, offset: int, statuses: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """List the newest jobs of all queues, newest first."""
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status.status import list_jobs as newest_jobs

    with session(Settings.load(redis_url=redis_url)) as connection:
        jobs = newest_jobs(connection, limit, statuses, offset=offset)
    for job in jobs:
        echo(json.dumps(job.as_json()) if as_json else describe(job))
    if not jobs and not as_json:
        some = "such " if statuses else "more " if offset else ""
        echo(f"There are no {some}jobs; add one with `svdq submit PHOTO`.", err=True)
