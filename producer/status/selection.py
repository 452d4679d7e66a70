"""Selects jobs: by prefixes of their ids, or by status, name and age."""

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

import redis

from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.producer.queue import no_such_job
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.registries import newest_ids
from svdq.producer.untrusted_job import AT_ONCE, key_of

MIN_PREFIX = 4
MAX_NAMED = 5  # ids in an error


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Criteria for jobs; empty ones allow all."""

    job_ids: Sequence[str] = ()  # prefixes; if there are any, the other criteria do not apply
    statuses: Sequence[str] = ()
    name: str = ""  # a pattern with * and ?
    owners: Sequence[str] = ()  # "" is the owner of jobs that name none, such as jobs of earlier versions
    since: datetime | None = None  # earliest end or, of jobs that have not ended, submission
    take_all: bool = False

    def among(self, allowed: Sequence[str]) -> Self:
        """Return it for an action on some statuses; raises InputError unless it has either ids or criteria that fit."""
        if bool(self.job_ids) == bool(self.statuses or self.name or self.owners or self.since or self.take_all):
            raise InputError("Give either IDs of jobs or options that select jobs, such as --all; see --help.")
        statuses = [status for status in allowed if not self.statuses or status in self.statuses]
        if not statuses:
            raise InputError(
                f"This is not for jobs that are {' or '.join(self.statuses)}, only for those that are "
                f"{' or '.join(allowed)}."
            )
        return replace(self, statuses=statuses)

    def matches_name(self, name: str) -> bool:
        """Return whether the name of a job matches."""
        return not self.name or fnmatch.fnmatchcase(name, self.name)

    def matches(self, view: JobView) -> bool:
        """Return whether a job matches."""
        return (
            (not self.statuses or view.status in self.statuses)
            and self.matches_name(view.name)
            and (not self.owners or view.owner in self.owners)
            and (self.since is None or (view.ended_at or view.created_at) >= self.since)
        )


def select(connection: redis.Redis, selection: Selection) -> list[JobView]:
    """Return the matching jobs without duplicates, oldest first unless ids were given; raises as `complete_ids`."""
    if selection.job_ids:
        return view_many(connection, complete_ids(connection, selection.job_ids))
    ids = newest_ids(connection, statuses=selection.statuses)
    found = [
        view
        for start in range(0, len(ids), AT_ONCE)
        for view in view_many(connection, ids[start : start + AT_ONCE])
        if view.is_readable and selection.matches(view)
    ]
    return sorted(found, key=lambda view: view.created_at)


def owners_of(connection: redis.Redis, job_ids: Sequence[str]) -> list[str | None]:
    """Read whose jobs these are: "" for jobs without an owner, None for jobs that there are not, or not any more."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hmget(key_of(job_id), "status", keys.OWNER_FIELD)
        answers = pipeline.execute(raise_on_error=False)
    return [
        (answer[1] or b"").decode(errors="replace") if isinstance(answer, list) and answer[0] is not None else None
        for answer in answers
    ]


def complete_ids(connection: redis.Redis, beginnings: Sequence[str]) -> list[str]:
    """Complete prefixes of ids in order, without duplicates; raises InputError if one is too short or not unique."""
    with connection.pipeline(transaction=False) as pipeline:
        for text in beginnings:
            pipeline.exists(key_of(text))
        are_whole = pipeline.execute()
    known = [] if all(are_whole) else newest_ids(connection)
    ids = [text if is_whole else complete_id(text, known) for text, is_whole in zip(beginnings, are_whole, strict=True)]
    return list(dict.fromkeys(ids))


def complete_id(beginning: str, known: Sequence[str]) -> str:
    """Return the one id with a prefix; raises as `complete_ids`."""
    found = sorted({job_id for job_id in known if job_id.startswith(beginning)})
    if not found or not beginning:
        raise no_such_job(beginning)
    if len(found) > 1:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise InputError(
            f"{beginning!r} is a prefix of {len(found)} ids: {', '.join(found[:MAX_NAMED])}{more}; "
            "give more characters."
        )
    if len(beginning) < MIN_PREFIX:
        raise InputError(f"{beginning!r} is too short for an id; give at least {MIN_PREFIX} characters of {found[0]}.")
    return found[0]


Place = tuple[bytes, str]  # where a page begins: time of submission as in RQ, and id

WINDOW = 1000  # ids read at first, per queue and status; more if a page needs them


def list_jobs(connection: redis.Redis, limit: int = 50, statuses: Sequence[str] = ()) -> list[JobView]:
    """Return the newest jobs of all queues, newest first; may miss a new one behind `WINDOW` others.

    Of queued jobs alone, return the next ones, in the order in which workers take them.
    """
    if tuple(statuses) == ("queued",):
        return view_many(connection, newest_ids(connection, limit, statuses, oldest=True)[:limit])
    # The newest ones may be anywhere: queues have the order in which jobs are taken, registries have the order of ends.
    job_ids = newest_ids(connection, max(limit, WINDOW), statuses)
    places = sorted(_places(connection, job_ids), reverse=True)
    return view_many(connection, [job_id for _, job_id in places[:limit]])


def place_of(connection: redis.Redis, job_id: str) -> Place | None:
    """Return the place of a job; None if there is no such job."""
    return next(iter(_places(connection, [job_id])), None)


def read_page(
    connection: redis.Redis,
    limit: int,
    after: Place | None = None,
    *,
    newest_first: bool = True,
    owners: Collection[str] = (),
) -> tuple[list[JobView], bool, Place | None]:
    """Read the jobs after a place, of some owners or of all, whether there are more, and the place of the last one."""
    window = WINDOW
    while True:
        job_ids = newest_ids(connection, window, oldest=not newest_first)
        places = sorted(_places(connection, job_ids), reverse=newest_first)
        if after is not None:
            places = [place for place in places if (place < after if newest_first else place > after)]
        if owners:
            found = owners_of(connection, [job_id for _, job_id in places])
            places = [place for place, owner in zip(places, found, strict=True) if owner in owners]
        # Each queue and status gives as many ids as there are, up to the window.
        if len(places) > limit or len(job_ids) < window:
            views = view_many(connection, [job_id for _, job_id in places[:limit]])
            end = next((place for place in places if views and place[1] == views[-1].id), None)
            return views, len(places) > limit, end
        window *= 4


def _places(connection: redis.Redis, job_ids: Sequence[str]) -> list[Place]:
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(key_of(job_id), "created_at")
        answers = pipeline.execute(raise_on_error=False)
    return [
        (moment if isinstance(moment, bytes) else b"", job_id)  # an error where the record is no hash
        for moment, job_id in zip(answers, job_ids, strict=True)
        if moment is not None
    ]
