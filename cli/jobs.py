"""`svdq status`, `svdq list` and `svdq info`: what is known of jobs, queues and workers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.main import redis_options
from svdq.cli.words import describe, echo, table, trouble_reason
from svdq.producer.moments import duration

if TYPE_CHECKING:
    from svdq.producer.status.ranks import GroupStatus
    from svdq.producer.status.status import QueueView

STATUSES = ("queued", "started", "scheduled", "deferred", "finished", "failed", "canceled")
#: Jobs in flight that `svdq info` shows at most.
MAX_IN_FLIGHT = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


STATUS_EXAMPLES = """\b
Examples:
  svdq status                 how many jobs wait, run, are finished
  svdq status 1f0c…           one job
  svdq status 1f0c… --json    every parameter as used
"""


@click.command(epilog=STATUS_EXAMPLES)
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@json_option
@redis_options
def status(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Show jobs: status, step, when they will be done, files and, as JSON, every parameter as used.

    Without an ID: how many jobs each queue has in each state.
    """
    from svdq.producer.control import pauses
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status.outlook import Outlook, outlooks
    from svdq.producer.status.ranks import read_groups
    from svdq.producer.status.status import view, view_queues

    with session(Settings.load(redis_url=redis_url)) as connection:
        groups = read_groups(connection)
        if not job_ids:
            _print_queues(view_queues(connection), pauses(connection), groups, as_json)
            return
        jobs = [view(connection, job_id) for job_id in job_ids]
        expected = outlooks(connection, jobs, groups)
    for job in jobs:
        outlook = expected.get(job.id, Outlook())
        echo(json.dumps(job.as_json() | outlook.as_json()) if as_json else describe(job, outlook))


LIST_EXAMPLES = """\b
Examples:
  svdq list
  svdq list --status failed --limit 10
  svdq list --skip 50                        the next page
  svdq list --json | jq -r '.outputs[]'
"""


@click.command("list", epilog=LIST_EXAMPLES)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Number of jobs at most.")
@click.option("--skip", type=click.IntRange(min=0), default=0, help="Leave out so many newer ones: the next page.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only these; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line.")
@redis_options
def list_jobs(limit: int, skip: int, statuses: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """List the newest jobs of all queues, newest first."""
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status.status import list_jobs as newest_jobs

    with session(Settings.load(redis_url=redis_url)) as connection:
        jobs = newest_jobs(connection, limit, statuses, skip=skip)
    for job in jobs:
        echo(json.dumps(job.as_json()) if as_json else describe(job))
    if not jobs and not as_json:
        some = "such " if statuses else "more " if skip else ""
        echo(f"There are no {some}jobs; put one in with `svdq submit PHOTO`.", err=True)


INFO_EXAMPLES = """\b
Examples:
  svdq info
  svdq info --json
"""


@click.command(epilog=INFO_EXAMPLES)
@json_option
@redis_options
def info(as_json: bool, redis_url: str | None) -> None:
    """Show the queues, the worker groups, what they wait for, and every job in flight with its step."""
    from svdq.producer.control import pauses
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status.outlook import Outlook, outlooks
    from svdq.producer.status.ranks import read_groups
    from svdq.producer.status.status import list_jobs as newest_jobs
    from svdq.producer.status.status import view_queues
    from svdq.producer.status.workers import view_workers

    with session(Settings.load(redis_url=redis_url)) as connection:
        queues = view_queues(connection)
        workers = view_workers(connection)
        groups = read_groups(connection)
        reasons = pauses(connection)
        jobs = newest_jobs(connection, MAX_IN_FLIGHT, ("started",))
        expected = outlooks(connection, jobs, groups)
    if as_json:
        document = {
            "queues": [{"name": queue.name, **queue.counts} for queue in queues],
            "eta_s": _eta_s(queues, groups),
            "workers": [asdict(worker) for worker in workers],
            "ranks": [rank.model_dump(mode="json") for group in groups for rank in group.ranks],
            "jobs": [job.as_json() | expected.get(job.id, Outlook()).as_json() for job in jobs],
            "pauses": list(reasons),
            "troubles": _troubles_json(groups),
        }
        echo(json.dumps(document))
        return
    _print_queues(queues, reasons, groups, as_json=False)
    echo()
    for worker in workers:
        echo(f"{worker.name}  {worker.state}  {worker.hostname}:{worker.pid}  {worker.finished} finished")
    if not workers:
        echo("No worker is running; start one with `svdq worker`.")
    if jobs:
        echo()
    rows = []
    for job in jobs:
        outlook = expected.get(job.id, Outlook())
        soon = "" if outlook.eta_s is None else f"about {duration(outlook.eta_s)}"
        place = "" if job.rank is None else f"rank {job.rank}"
        step = "waits for storage" if outlook.trouble else f"step {job.step}/{job.steps}"
        rows.append((job.id, job.name, step, place, job.notice, soon))
    for line in table(rows):
        echo(line)


def _troubles(groups: "Sequence[GroupStatus]") -> list[str]:
    """Say what groups wait for, a sentence each."""
    return [
        f"WAITING FOR STORAGE on {rank.host}, rank {rank.rank}. {trouble.effect}: {trouble_reason(trouble)}"
        for group in groups
        for rank in group.ranks
        for trouble in rank.troubles
    ]


def _troubles_json(groups: "Sequence[GroupStatus]") -> list[dict[str, Any]]:
    return [
        {"host": rank.host, "rank": rank.rank, **trouble.model_dump(mode="json")}
        for group in groups
        for rank in group.ranks
        for trouble in rank.troubles
    ]


def _eta_s(queues: "Sequence[QueueView]", groups: "Sequence[GroupStatus]") -> float | None:
    from svdq.producer.status.eta import queue_eta_s

    eta_s = queue_eta_s(sum(queue.counts["queued"] for queue in queues), groups)
    return None if eta_s is None else round(eta_s, 1)


def _print_queues(
    queues: "Sequence[QueueView]", pauses: Sequence[str], groups: "Sequence[GroupStatus]", as_json: bool
) -> None:
    """Print the number of jobs by queue and state, what keeps them waiting, and when all will be done."""
    eta_s = _eta_s(queues, groups)
    if as_json:
        document = {
            "queues": [{"name": queue.name, **queue.counts} for queue in queues],
            "eta_s": eta_s,
            "pauses": list(pauses),
            "troubles": _troubles_json(groups),
        }
        echo(json.dumps(document))
        return
    for sentence in [*pauses, *_troubles(groups)]:
        echo(sentence)
    rows = [("queue", *STATUSES), *((queue.name, *(queue.counts[name] for name in STATUSES)) for queue in queues)]
    for line in table(rows):
        echo(line)
    if eta_s:
        echo(f"All that waits will be done in about {duration(eta_s)}.")
