"""`svdq status`, `svdq list` and `svdq info`: what is known of jobs, queues and workers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from svdq.cli.main import redis_options
from svdq.cli.words import describe, table

if TYPE_CHECKING:
    from svdq.producer.status import QueueView

STATUSES = ("queued", "started", "scheduled", "deferred", "finished", "failed", "canceled")
#: Jobs in flight that `svdq info` shows at most.
MAX_IN_FLIGHT = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@json_option
@redis_options
def status(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Show jobs: status, step, files and, as JSON, every parameter as used.

    Without an ID: how many jobs each queue has in each state.
    """
    from svdq.producer.control import pauses
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status import view, view_queues

    with session(Settings.load(redis_url=redis_url)) as connection:
        if not job_ids:
            _print_queues(view_queues(connection), pauses(connection), as_json)
        for job in [view(connection, job_id) for job_id in job_ids]:
            click.echo(json.dumps(job.as_json()) if as_json else describe(job))


@click.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of jobs at most.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only these; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line.")
@redis_options
def list_jobs(limit: int, statuses: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """List the newest jobs of all queues, newest first."""
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status import list_jobs as newest_jobs

    with session(Settings.load(redis_url=redis_url)) as connection:
        jobs = newest_jobs(connection, limit, statuses)
    for job in jobs:
        click.echo(json.dumps(job.as_json()) if as_json else describe(job))
    if not jobs and not as_json:
        click.echo("There are no jobs; put one in with `svdq submit PHOTO`.", err=True)


@click.command()
@json_option
@redis_options
def info(as_json: bool, redis_url: str | None) -> None:
    """Show the queues, the worker groups and every job in flight with its step."""
    from svdq.producer.control import pauses
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status import list_jobs as newest_jobs
    from svdq.producer.status import view_queues, view_workers

    with session(Settings.load(redis_url=redis_url)) as connection:
        queues = view_queues(connection)
        workers = view_workers(connection)
        reasons = pauses(connection)
        jobs = newest_jobs(connection, MAX_IN_FLIGHT, ("started",))
    if as_json:
        document = {
            "queues": [{"name": queue.name, **queue.counts} for queue in queues],
            "workers": [asdict(worker) for worker in workers],
            "jobs": [job.as_json() for job in jobs],
            "pauses": list(reasons),
        }
        click.echo(json.dumps(document))
        return
    _print_queues(queues, reasons, as_json=False)
    click.echo()
    for worker in workers:
        click.echo(f"{worker.name}  {worker.state}  {worker.hostname}:{worker.pid}  {worker.finished} finished")
    if not workers:
        click.echo("No worker is running; start one with `svdq worker`.")
    if jobs:
        click.echo()
    rows = [
        (job.id, job.name, f"step {job.step}/{job.steps}", "" if job.rank is None else f"rank {job.rank}", job.notice)
        for job in jobs
    ]
    for line in table(rows):
        click.echo(line)


def _print_queues(queues: "Sequence[QueueView]", pauses: Sequence[str], as_json: bool) -> None:
    if as_json:
        counts = [{"name": queue.name, **queue.counts} for queue in queues]
        click.echo(json.dumps({"queues": counts, "pauses": list(pauses)}))
        return
    for sentence in pauses:
        click.echo(sentence)
    rows = [("queue", *STATUSES), *((queue.name, *(queue.counts[name] for name in STATUSES)) for queue in queues)]
    for line in table(rows):
        click.echo(line)
