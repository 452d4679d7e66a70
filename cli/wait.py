"""`svdq wait`, and the waiting of `svdq submit --wait`: bars on a terminal, else a line for each job that ends."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from svdq.cli.bars import MAX_BARS, Bars, Display, Lines
from svdq.cli.main import EXIT_FAILED, redis_options
from svdq.cli.words import describe, trouble_reason

if TYPE_CHECKING:
    import redis

    from svdq.producer.settings import Settings
    from svdq.producer.status.ranks import GroupStatus
    from svdq.producer.status.status import JobView

POLL_S = 0.3
#: Rests are at least this many times as long as looking: with thousands of jobs that takes a while.
POLL_SHARE = 3
#: Seconds that Redis may be away, for a restart, before waiting gives up.
PATIENCE_S = 30.0
#: Seconds without a worker before we say so.
NO_WORKER_S = 2.0


EXAMPLES = """\b
Examples:
  svdq wait 1f0c…
  svdq wait 1f0c… 2a7d… --json
"""


@click.command(epilog=EXAMPLES)
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


def wait_for(
    settings: "Settings",
    job_ids: Sequence[str],
    *,
    quiet: bool,
    on_end: "Callable[[JobView], None] | None" = None,
) -> "tuple[list[JobView], int]":
    """Wait until all jobs have ended; return them in the order asked for, and the exit code that tells how.

    Args:
        settings: of this process.
        job_ids: what to wait for.
        quiet: print nothing.
        on_end: called with each job as it ends.
    """
    from svdq.producer.queue import session
    from svdq.producer.status.outlook import outlooks

    job_ids = list(dict.fromkeys(job_ids))
    live = sys.stderr.isatty() and not quiet
    with session(settings) as connection:
        display: Display = Bars(len(job_ids)) if live else Lines()
        ended: dict[str, JobView] = {}
        with display:
            for views, groups in _poll(connection, job_ids, display):
                expected = outlooks(connection, views, groups) if live else {}
                for view in views:
                    display.show(view, expected.get(view.id))
                    if view.ended:
                        ended[view.id] = view
                        if on_end:
                            on_end(view)
                        if not live and not quiet:
                            click.echo(describe(view))
                            sys.stdout.flush()
    # Only now that the bars are gone: stdout may be the same terminal.
    if live:
        for view in ended.values():
            click.echo(describe(view))
    exit_code = 0 if all(view.status == "finished" for view in ended.values()) else EXIT_FAILED
    return [ended[job_id] for job_id in job_ids], exit_code


def _poll(
    connection: "redis.Redis", job_ids: Sequence[str], display: Display
) -> "Iterator[tuple[list[JobView], list[GroupStatus]]]":
    """Yield how the jobs stand that have not ended before, and the groups, again and again until all have ended."""
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.control import pauses
    from svdq.producer.queue import fetch, statuses
    from svdq.producer.status.ranks import read_groups
    from svdq.producer.status.status import ENDED, view_many
    from svdq.producer.status.workers import worker_state

    pending = list(job_ids)
    started = last_answer = time.monotonic()
    # What keeps jobs waiting and was said.
    told: set[str] = set()
    is_worker_sought = False
    while True:
        begin = time.monotonic()
        try:
            stand = dict(zip(pending, statuses(connection, pending), strict=True))
            # What waits in a queue is not looked at, beyond what is shown: there may be ten thousand of it.
            waiting = [job_id for job_id in pending if stand[job_id] not in (*ENDED, "started", None)]
            unseen = set(waiting[MAX_BARS:])
            seen = [job_id for job_id in pending if job_id not in unseen]
            views = view_many(connection, seen)
            for gone in set(seen) - {view.id for view in views}:
                fetch(connection, gone)  # tells that there is no such job
            if not is_worker_sought and time.monotonic() - started > NO_WORKER_S:
                state = worker_state(connection)
                is_worker_sought = state != "starting"
                if state == "none":
                    display.say("No worker is running; start one with `svdq worker`.")
            groups = read_groups(connection)
            held_up = _held_up(pauses(connection), groups)
            for what in held_up.keys() - told:
                display.say(held_up[what])
            told = set(held_up)
        except (LostError, SlowError):
            if time.monotonic() - last_answer > PATIENCE_S:
                raise
        else:
            last_answer = time.monotonic()
            yield views, groups
            over = {view.id for view in views if view.ended}
            pending = [job_id for job_id in pending if job_id not in over]
            if not pending:
                return
        time.sleep(max(POLL_S, POLL_SHARE * (time.monotonic() - begin)))


def _held_up(pauses: Sequence[str], groups: "Sequence[GroupStatus]") -> dict[str, str]:
    """Say what keeps jobs waiting at present; the sentences by what makes them different."""
    held_up = {sentence: sentence for sentence in pauses}
    for group in groups:
        for rank in group.ranks:
            for trouble in rank.troubles:
                what = f"{trouble.effect}: {trouble_reason(trouble)}"
                held_up[f"{group.name} {rank.rank} {trouble.effect}"] = f"On {rank.host}, rank {rank.rank}: {what}"
    return held_up
