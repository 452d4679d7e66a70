"""What programs do with the jobs that they submit: one call each, which connects and disconnects."""

import math
import time
from collections.abc import Callable, Iterable

import redis

from svdq.producer import job_control
from svdq.producer.queue import ENDED, fetch, session, statuses
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView, view, view_many

#: Seconds between two looks at the jobs that have not ended.
POLL_S = 0.3
#: Pauses are at least this many times as long as a look: with thousands of jobs a look takes a while.
POLL_SHARE = 3
#: Seconds of a Redis outage, such as a restart, after which waiting fails.
MAX_OUTAGE_S = 30.0
#: Waiting jobs that are read at a look; further ones are read when they have started.
MAX_WAITING = 20


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


def wait_for_jobs(
    settings: Settings,
    job_ids: str | Iterable[str],
    *,
    timeout_s: float | None = None,
    on_look: Callable[[redis.Redis, list[JobView]], object] = lambda connection, views: None,
) -> list[JobView]:
    """Wait until all jobs have ended, also through a restart of Redis; return them in the given order.

    Args:
        settings: of this process.
        job_ids: full ids, as `submit` returns them.
        timeout_s: seconds after which the jobs are returned as they are; None waits without a limit.
        on_look: called at each look with the jobs that had not ended before, without most of those that wait.

    Raises:
        InputError: there is no such job, or it was removed while it was waited for.
        UnavailableError: Redis cannot be reached.
    """
    job_ids = [job_ids] if isinstance(job_ids, str) else list(dict.fromkeys(job_ids))
    answered = time.monotonic()
    deadline = answered + (math.inf if timeout_s is None else timeout_s)
    ended: dict[str, JobView] = {}
    with session(settings) as connection:
        while True:
            begin = time.monotonic()
            try:
                pending = [job_id for job_id in job_ids if job_id not in ended]
                found = zip(pending, statuses(connection, pending), strict=True)
                waiting = [job_id for job_id, status in found if status not in (*ENDED, "started", None)]
                unseen = set() if begin >= deadline else set(waiting[MAX_WAITING:])  # there may be ten thousand
                seen = [job_id for job_id in pending if job_id not in unseen]
                views = {view.id: view for view in view_many(connection, seen)}
                for gone in set(seen) - views.keys():
                    fetch(connection, gone)  # raises
                on_look(connection, list(views.values()))
                ended |= {view.id: view for view in views.values() if view.ended}
                if begin >= deadline or len(ended) == len(job_ids):
                    return [(ended | views)[job_id] for job_id in job_ids]
                answered = time.monotonic()
            except (redis.ConnectionError, redis.TimeoutError):
                if time.monotonic() >= min(deadline, answered + MAX_OUTAGE_S):
                    raise
            rest_s = max(POLL_S, POLL_SHARE * (time.monotonic() - begin))
            time.sleep(max(0.0, min(rest_s, deadline - time.monotonic())))
