"""Summarizes a run of `svdq worker` at its end. Does not import torch."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

from svdq.pipeline.errors import UnavailableError
from svdq.producer.control import pauses
from svdq.producer.queue import session
from svdq.producer.results.run_records import jobs_left, records_from_redis, records_from_storage
from svdq.producer.results.run_report import RunReport, summarize
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.worker.launcher.launcher import Ending

logger = logging.getLogger(__name__)


def report_of_run(settings: Settings, ending: Ending, started_at: datetime, *, until: str | None) -> RunReport:
    """Report the jobs that ended during a run, without the busy share if the storage cannot be reached.

    `started_at` has a zone; `until` is the value of --until.

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
        logger.warning("The report goes without the busy share: %s", error)
    return summarize(
        records,
        left,
        since=started_at,
        until=now,
        ending=why_ended(ending, until=until, left=left, pauses=reasons),
        num_ranks=ending.num_ranks,
    )


def why_ended(ending: Ending, *, until: str | None, left: Mapping[str, int], pauses: Sequence[str]) -> str:
    """Say why a run ended.

    `left` counts the unfinished jobs by state, `pauses` says in a sentence each why no jobs are taken.
    """
    if ending.ended_by == "signal":
        return "It was stopped by a signal."
    if ending.code:
        return f"It failed with exit code {ending.code}; its log says why."
    if ending.ended_by == "until":
        return f"It ended at the time given, {until}."
    if left.get("queued"):
        if pauses:
            return f"It ended because no jobs are taken. {pauses[0]}"
        if until:
            return f"It ended because no further video could be done by {until}."
    return "It ended because the queue was empty."
