"""What programs do with the jobs that they submit: one call each, which connects and disconnects."""

import math
import time
from collections.abc import Callable, Iterable

import redis

from svdq.producer import job_control
from svdq.producer.queue import fetch, session
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView, view, view_many

#: Seconds between two looks at the jobs that have not ended.
POLL_S = 0.5
#: Pauses are at least this many times as long as a look: with thousands of jobs a look takes a while.
POLL_SHARE = 3


def job_status(settings: Settings, job_id: str) -> JobView:
    """Read one job.

    Raises:
        InputError: there is no such job.
        UnavailableError: Redis cannot be reached.
    """
    with session(settings) as connection:
        return view(connection, job_id)


def cancel(settings: Settings, job_ids: str | Iterable[str]) -> list[JobView]:
    """Cancel jobs, all or none: waiting ones at once, those in flight at their next step; return them.

    Raises:
        InputError: there is no such job, or it has ended; nothing was canceled.
        UnavailableError: Redis cannot be reached.
    """
    return _change(settings, job_ids, "cancel", job_control.cancel)


def retry(settings: Settings, job_ids: str | Iterable[str]) -> list[JobView]:
    """Queue failed, stopped and canceled jobs again, all or none, with the same ids and seeds; return them.

    Raises:
        InputError: there is no such job, or it has another status; nothing was queued.
        UnavailableError: Redis cannot be reached.
    """
    return _change(settings, job_ids, "retry", job_control.retry)


def _change(
    settings: Settings,
    job_ids: str | Iterable[str],
    action: job_control.Action,
    act: Callable[[redis.Redis, str], object],
) -> list[JobView]:
    ids = [job_ids] if isinstance(job_ids, str) else list(dict.fromkeys(job_ids))
    with session(settings) as connection:
        job_control.check(connection, action, ids)
        for job_id in ids:
            act(connection, job_id)
        return view_many(connection, ids)


def wait_for_jobs(settings: Settings, job_ids: str | Iterable[str], *, timeout_s: float | None = None) -> list[JobView]:
    """Wait until all jobs have ended; return them in the given order.

    Args:
        settings: of this process.
        job_ids: full ids, as `submit` returns them.
        timeout_s: seconds after which the jobs are returned as they are; None waits without a limit.

    Raises:
        InputError: there is no such job, or it was removed while it was waited for.
        UnavailableError: Redis cannot be reached.
    """
    job_ids = [job_ids] if isinstance(job_ids, str) else list(dict.fromkeys(job_ids))
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    views: dict[str, JobView] = {}
    with session(settings) as connection:
        while True:
            begin = time.monotonic()
            pending = [job_id for job_id in job_ids if job_id not in views or not views[job_id].ended]
            found = {each.id: each for each in view_many(connection, pending)}
            for job_id in pending:
                if job_id not in found:
                    fetch(connection, job_id)  # raises
            views |= found
            now = time.monotonic()
            if now >= deadline or all(each.ended for each in views.values()):
                return [views[job_id] for job_id in job_ids]
            time.sleep(min(max(POLL_S, POLL_SHARE * (now - begin)), deadline - now))
