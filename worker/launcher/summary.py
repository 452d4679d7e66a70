"""Summarizes a run of `svdq worker` at its end. Does not import torch."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from svdq.pipeline.errors import UnavailableError
from svdq.producer.job_control import pauses
from svdq.producer.queue import session
from svdq.producer.results.run_report import RunReport, jobs_left, records_from_redis, records_from_storage, summarize
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.worker.launcher.launcher import Ending

logger = logging.getLogger(__name__)

#: How a burst ends that leaves jobs in the queue because of a pause.
NOT_TAKEN = "It ended because no jobs are taken."


def report_of_run(settings: Settings, ending: Ending, started_at: datetime) -> RunReport:
    """Report the jobs that ended during a run.

    `started_at` has a zone.

    Raises:
        UnavailableError: Redis cannot be reached.
    """
    now = datetime.now().astimezone()
    with session(settings) as connection:
        records = list(records_from_redis(connection, started_at, now, logger.warning))
        left = jobs_left(connection)
        reasons = pauses(connection)
    try:
        records += records_from_storage(Storage(settings.storage), started_at, logger.warning)
    except UnavailableError as error:
        logger.warning("The report has only the jobs that Redis still knows: %s", error)
    return summarize(
        records,
        left,
        since=started_at,
        until=now,
        ending=why_ended(ending, started_at, left=left, pauses=reasons),
    )


def exit_code(ending: Ending, report: RunReport) -> int:
    """Return the exit code of a run: 1 also for a burst in which all videos failed, or which found the queue paused."""
    all_failed = report.count("failed") > 0 and not report.count("finished")
    return ending.code or int(ending.burst and (all_failed or report.ending.startswith(NOT_TAKEN)))


def why_ended(ending: Ending, started_at: datetime, *, left: Mapping[str, int], pauses: Sequence[str]) -> str:
    """Say why a run ended.

    `started_at` has a zone, `left` counts the unfinished jobs by state, and `pauses` says in a sentence each why no
    jobs are taken.
    """
    if ending.ended_by == "signal":
        return "It was stopped by a signal."
    if ending.code:
        return f"It failed with exit code {ending.code}; its log says why."
    if ending.ended_by == "until" or (ending.until_s is not None and not ending.burst):
        return f"It ended at the time given, {_until(ending, started_at)}."
    if left.get("queued"):
        if pauses:
            return f"{NOT_TAKEN} {pauses[0]}"
        if ending.until_s is not None:
            return f"It ended because no further video could be done by {_until(ending, started_at)}."
    return "It ended because the queue was empty."


def _until(ending: Ending, started_at: datetime) -> str:
    assert ending.until_s is not None
    until = datetime.fromtimestamp(ending.until_s).astimezone()
    return until.strftime("%H:%M" if until - started_at < timedelta(days=1) else "%Y-%m-%d %H:%M")
