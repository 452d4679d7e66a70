"""`svdq wait`, and `--wait` of other commands: progress on a terminal, else a line for each job that ends."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import redis
from rich.console import Console
from rich.live import Live
from rich.text import Text

from svdq.cli.formatting import condition_sentence, describe, echo, echo_json, outage_of, sentence_of_workers
from svdq.cli.main import EXIT_FAILED
from svdq.cli.option_types import json_option, redis_option
from svdq.pipeline.errors import UnavailableError
from svdq.producer.connection import session
from svdq.producer.pauses import read_pauses
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import JobsLostError, JobView, wait_for_jobs
from svdq.producer.status.ranks import GroupStatus, conditions_of, read_groups
from svdq.producer.status.registries import read_workers
from svdq.producer.status.selection import complete_ids
from svdq.producer.status.snapshot import estimate
from svdq.producer.text import parse_duration, printable
from svdq.producer.together import ask_one

NO_WORKER_S = 2.0  # seconds without a worker before a notice is printed
MAX_SHOWN = 20  # largest number of jobs whose progress is shown


@click.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", metavar="TIME", help="Give up after this time: 90s, 30m, 2h.")
@json_option("job")
@redis_option
def wait(job_ids: tuple[str, ...], timeout: str | None, as_json: bool, redis_url: str | None) -> int:
    """Wait for jobs and print the paths of their videos.

    The exit code is 0 when all jobs are finished, and 1 when a job has failed or --timeout has passed.

    \b
    Examples:
      svdq wait 1f0c
      svdq wait 1f0c 2a7d --json
      svdq wait 1f0c --timeout 2h
    """
    timeout_s = None if timeout is None else parse_duration(timeout, "--timeout").total_seconds()
    settings = load_settings(redis_url=redis_url)
    with session(settings) as connection:
        ids = complete_ids(connection, job_ids)
    views, exit_code = wait_for(settings, ids, quiet=as_json, timeout_s=timeout_s)
    if as_json:
        for view in views:
            echo_json(view.as_json())
    for path in (gone := [path for view in views for path in view.outputs if _is_gone(Path(path))]):
        echo(f"Error: The file {path!r} was removed; submit its photo again to render it again.", err=True)
    num_left = sum(not view.ended for view in views)
    if num_left:
        echo(f"Error: {num_left:,} of {len(views):,} jobs had not ended after {timeout}.", err=True)
    return EXIT_FAILED if gone else exit_code


def _is_gone(path: Path) -> bool:
    """Whether a file is missing in a folder that is there: others are on another machine or disk."""
    return path.is_absolute() and path.parent.is_dir() and not path.exists()


def wait_for(
    settings: Settings,
    job_ids: Sequence[str],
    *,
    quiet: bool,
    on_end: Callable[[JobView], None] | None = None,
    timeout_s: float | None = None,
) -> tuple[list[JobView], int]:
    """Wait for the end of all jobs or of the time; return them in order of `job_ids`, and the exit code."""
    job_ids = list(dict.fromkeys(job_ids))
    live = None
    if sys.stderr.isatty() and not quiet:
        live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
        live.start()
    log = partial(live.console.print, markup=False, highlight=False) if live else partial(echo, err=True)
    reasons = _Reasons(log)
    ended: dict[str, JobView] = {}

    def left() -> str:
        return _interrupted([job_id for job_id in job_ids if job_id not in ended])

    def show(connection: redis.Redis, views: list[JobView]) -> None:
        groups = reasons.log(connection, views)
        if live:
            live.update(_progress(views, estimate(connection, views, groups)), refresh=True)
        for view in [view for view in views if view.ended]:
            ended[view.id] = view
            if on_end:
                on_end(view)
            if not live and not quiet:
                echo(describe(view))
                sys.stdout.flush()

    lost: JobsLostError | None = None
    try:
        found = wait_for_jobs(
            settings, job_ids, timeout_s=timeout_s, on_look=show, on_outage=lambda: log(outage_of(time.time()))
        )
    except JobsLostError as error:
        lost, found = error, error.others
    except UnavailableError as error:
        raise UnavailableError(f"{error} {left()}".rstrip()) from error
    except KeyboardInterrupt:
        if sentence := left():
            echo(sentence, err=True)
        raise
    finally:
        if live:
            live.stop()
    # Printed after the progress is cleared: stdout may be the same terminal.
    for view in ended.values() if live else ():
        echo(describe(view))
    if lost is not None:
        echo(f"Error: {lost}", err=True)
        return found, EXIT_FAILED
    return found, 0 if all(view.status == "finished" and view.is_readable for view in found) else EXIT_FAILED


def _interrupted(left: Sequence[str]) -> str:
    if len(left) > 1:
        return f"{len(left):,} jobs go on; follow them with `svdq status`, cancel them with `svdq cancel ID...`."
    if not left:
        return ""
    return f"Job {left[0]} goes on; follow it with `svdq wait {left[0]}`, cancel it with `svdq cancel {left[0]}`."


def _progress(views: Sequence[JobView], estimates: dict[str, Estimate]) -> Text:
    left = [view for view in views if not view.ended]
    lines = [printable(describe(view, estimates.get(view.id))) for view in left[:MAX_SHOWN]]
    if len(views) > 1:
        lines.append(f"{len(views) - len(left):,} of {len(views):,} jobs have ended.")
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


class _Reasons:
    """Logs why jobs are not done, each reason once as long as it holds."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._no_worker_since = math.inf
        self._logged: set[str] = set()

    def log(self, connection: redis.Redis, views: Sequence[JobView]) -> list[GroupStatus]:
        """Log new reasons; return the groups of ranks."""
        now = time.monotonic()
        groups = read_groups(connection)
        state = "running" if groups else ask_one(connection, read_workers())[1]
        has_worker = state in ("running", "starting")
        self._no_worker_since = math.inf if has_worker else min(now, self._no_worker_since)
        reasons = {each.text: each.text for each in read_pauses(connection)}
        for rank, condition in conditions_of(groups):
            reasons[f"{rank.key} {condition.effect}"] = condition_sentence(rank, condition)
        # A burst ends with its last job.
        if now - self._no_worker_since > NO_WORKER_S and not all(view.ended for view in views):
            reasons["worker"] = sentence_of_workers(state)
        for key in reasons.keys() - self._logged:
            self._log(printable(reasons[key]))
        self._logged = set(reasons)
        return groups
