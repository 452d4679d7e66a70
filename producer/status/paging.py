"""Lists jobs by the time of their submission: the newest ones, or pages from a job onwards."""

from collections.abc import Sequence

import redis

from svdq.producer.status.registries import newest_ids
from svdq.producer.status.status import JobView, view_many
from svdq.producer.untrusted_job import key_of

#: Where a page begins: the time of submission as RQ writes it, which sorts as text, and the id.
Place = tuple[bytes, str]

#: Ids read at first, per queue and status; more if a page needs them.
WINDOW = 1000


def list_jobs(
    connection: redis.Redis, limit: int = 50, statuses: Sequence[str] = (), *, offset: int = 0
) -> list[JobView]:
    """Return the newest jobs of all queues, newest first.

    The newest `offset` jobs are left out: they are on the pages before. A new job that was moved in front of more than
    `WINDOW` others, or that ended before as many, may be missing.
    """
    # The newest ones may be anywhere: queues have the order in which jobs are taken, registries that of their ends.
    job_ids = newest_ids(connection, max(offset + limit, WINDOW), statuses)
    places = sorted(_places(connection, job_ids), reverse=True)
    return view_many(connection, [job_id for _, job_id in places[offset : offset + limit]])


def place_of(connection: redis.Redis, job_id: str) -> Place | None:
    """Return the place of a job; None if there is no such job."""
    return next(iter(_places(connection, [job_id])), None)


def read_page(
    connection: redis.Redis, limit: int, after: Place | None = None, *, newest_first: bool = True
) -> tuple[list[JobView], bool]:
    """Read the jobs after a place, and whether there are more."""
    window = WINDOW
    while True:
        job_ids = newest_ids(connection, window, oldest=not newest_first)
        places = sorted(_places(connection, job_ids), reverse=newest_first)
        if after is not None:
            places = [place for place in places if (place < after if newest_first else place > after)]
        # Each queue and status gives as many ids as there are, up to the window.
        if len(places) > limit or len(job_ids) < window:
            page = [job_id for _, job_id in places[:limit]]
            return view_many(connection, page), len(places) > limit
        window *= 4


def _places(connection: redis.Redis, job_ids: Sequence[str]) -> list[Place]:
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.exists(key_of(job_id))
            pipeline.hget(key_of(job_id), "created_at")
        answers = pipeline.execute(raise_on_error=False)
    return [
        (moment if isinstance(moment, bytes) else b"", job_id)
        for is_there, moment, job_id in zip(answers[::2], answers[1::2], job_ids, strict=True)
        if is_there is True or is_there == 1
    ]
