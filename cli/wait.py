"""`svdq wait`, and `--wait` of other commands: bars on a terminal, else a line for each job that ends."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from svdq.cli.bars import MAX_BARS, Bars, Display, Lines
from svdq.cli.formatting import condition_reason, describe, echo
from svdq.cli.main import EXIT_FAILED, redis_options

if TYPE_CHECKING:
    import redis

    from svdq.producer.settings import Settings
    from svdq.producer.status.ranks import GroupStatus
    from svdq.producer.status.status import JobView

POLL_S = 0.3
#: The pause between polls is at least this many times as long as a poll, which takes a while with thousands of jobs.
POLL_SHARE = 3
#: Seconds of a Redis outage, such as a restart, after which waiting fails.
PATIENCE_S = 30.0
#: Seconds without a worker before a notice is printed.
NO_WORKER_S = 2.0


EXAMPLES = """\b
Examples:
  svdq wait 1f0c
  svdq wait 1f0c 2a7d --json
  svdq wait 1f0c --timeout 2h
"""


@click.command(epilog=EXAMPLES)
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", metavar="TIME", help="Give up after this time: 90s, 30m, 2h.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job, one a line.")
@redis_options
def wait(job_ids: tuple[str, ...], timeout: str | None, as_json: bool, redis_url: str | None) -> int:
    """Wait for jobs and print the paths of their videos.

    The exit code is 0 when all jobs are finished, and 1 when a job has failed or --timeout has passed.
    """
    from svdq.producer.queue import session
    from svdq.producer.selection import complete_ids
    from svdq.producer.settings import Settings
    from svdq.producer.timeparse import parse_age

    timeout_s = parse_age(timeout, "--timeout").total_seconds() if timeout else None
    settings = Settings.load(redis_url=redis_url)
    with session(settings) as connection:
        ids = complete_ids(connection, job_ids)
    views, exit_code = wait_for(settings, ids, quiet=as_json, timeout_s=timeout_s)
    if as_json:
        for view in views:
            echo(json.dumps(view.as_json()))
    num_left = sum(not view.ended for view in views)
    if num_left:
        echo(f"Error: {num_left} of {len(views)} jobs had not ended after {timeout}.", err=True)
    return exit_code


def wait_for(
    settings: "Settings",
    job_ids: Sequence[str],
    *,
    quiet: bool,
    on_end: "Callable[[JobView], None] | None" = None,
    timeout_s: float | None = None,
) -> "tuple[list[JobView], int]":
    """Wait until all jobs have ended; return them in the order of `job_ids`, and the exit code.

    Args:
        settings: of this process.
        job_ids: jobs to wait for.
        quiet: print nothing.
        on_end: called with each job when it ends.
        timeout_s: seconds after which the jobs are returned even if some have not ended; None waits without limit.
    """
    from svdq.producer.queue import session
    from svdq.producer.status.snapshot import estimate
    from svdq.producer.status.status import view_many

    job_ids = list(dict.fromkeys(job_ids))
    live = sys.stderr.isatty() and not quiet
    give_up_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    with session(settings) as connection:
        display: Display = Bars(len(job_ids)) if live else Lines()
        ended: dict[str, JobView] = {}
        with display:
            for views, groups in _poll(connection, job_ids, display, give_up_at):
                expected = estimate(connection, views, groups) if live else {}
                for view in views:
                    display.show(view, expected.get(view.id))
                    if view.ended:
                        ended[view.id] = view
                        if on_end:
                            on_end(view)
                        if not live and not quiet:
                            echo(describe(view))
                            sys.stdout.flush()
        pending = {view.id: view for view in view_many(connection, [each for each in job_ids if each not in ended])}
    # Printed after the bars are cleared: stdout may be the same terminal.
    if live:
        for view in ended.values():
            echo(describe(view))
    known = ended | pending
    found = [known[job_id] for job_id in job_ids if job_id in known]
    return found, 0 if all(view.status == "finished" and view.is_readable for view in found) else EXIT_FAILED


def _poll(
    connection: "redis.Redis", job_ids: Sequence[str], display: Display, give_up_at: float
) -> "Iterator[tuple[list[JobView], list[GroupStatus]]]":
    """Yield the jobs that had not ended before, and the groups, until all jobs have ended or the time is up."""
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.control import pauses
    from svdq.producer.queue import fetch, statuses
    from svdq.producer.status.ranks import read_groups
    from svdq.producer.status.status import ENDED, view_many
    from svdq.producer.status.workers import worker_state

    pending = list(job_ids)
    started = last_answer = time.monotonic()
    # Reasons for waiting that have been printed.
    told: set[str] = set()
    is_worker_sought = False
    was_state = ""
    while True:
        begin = time.monotonic()
        try:
            stand = dict(zip(pending, statuses(connection, pending), strict=True))
            # Only the queued jobs that are shown are polled: there may be ten thousand more.
            waiting = [job_id for job_id in pending if stand[job_id] not in (*ENDED, "started", None)]
            unseen = set(waiting[MAX_BARS:])
            seen = [job_id for job_id in pending if job_id not in unseen]
            views = view_many(connection, seen)
            for gone in set(seen) - {view.id for view in views}:
                fetch(connection, gone)  # raises
            if not is_worker_sought and time.monotonic() - started > NO_WORKER_S:
                state = worker_state(connection)
                # Seen missing twice: it may have ended the job, and itself, since the job was looked at.
                is_worker_sought = state == "running" or (state == was_state == "none")
                was_state = state
                if is_worker_sought and state == "none":
                    display.log("No worker is running; start one with `svdq worker`.")
            groups = read_groups(connection)
            held_up = _held_up(pauses(connection), groups)
            for what in held_up.keys() - told:
                display.log(held_up[what])
            told = set(held_up)
        except (LostError, SlowError):
            if time.monotonic() - last_answer > PATIENCE_S or time.monotonic() >= give_up_at:
                raise
        else:
            last_answer = time.monotonic()
            yield views, groups
            over = {view.id for view in views if view.ended}
            pending = [job_id for job_id in pending if job_id not in over]
            if not pending or time.monotonic() >= give_up_at:
                return
        rest_s = max(POLL_S, POLL_SHARE * (time.monotonic() - begin))
        time.sleep(max(0.0, min(rest_s, give_up_at - time.monotonic())))


def _held_up(pauses: Sequence[str], groups: "Sequence[GroupStatus]") -> dict[str, str]:
    """Return the reasons why jobs wait at present, by a key that identifies each reason."""
    held_up = {sentence: sentence for sentence in pauses}
    for group in groups:
        for rank in group.ranks:
            for condition in rank.conditions:
                what = f"{condition.effect}: {condition_reason(condition)}"
                held_up[f"{group.name} {rank.rank} {condition.effect}"] = f"On {rank.host}, rank {rank.rank}: {what}"
    return held_up
