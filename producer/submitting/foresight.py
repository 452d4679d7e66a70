"""What a submission would do, whether its owner may, and when its videos would be done; submits nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice

import redis

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job
from svdq.producer.job_control import WAITING
from svdq.producer.keys import UNRENDERED
from svdq.producer.queue import statuses
from svdq.producer.status.estimates import Backlog, Estimate, estimate_all, with_more
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.selection import owners_of
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.submitting.enqueue import CHUNK
from svdq.producer.submitting.entries import Entry, Submission

MOST_READ = 200  # of the jobs of a submission, for an estimate


def foresee(connection: redis.Redis, entries: Iterable[Entry]) -> Iterator[Submission]:
    """Yield what would come of enqueuing entries; changes nothing."""
    entries, seen = iter(entries), set()
    while chunk := list(islice(entries, CHUNK)):
        found = statuses(connection, [entry.job_id for entry in chunk])
        for entry, status in zip(chunk, found, strict=True):
            is_new = (status is None or status in UNRENDERED) and entry.job_id not in seen
            was = status or "" if is_new else ""
            yield Submission(entry=entry, job=entry.job, status=status or "new", is_new=is_new, was=was)
            seen.add(entry.job_id)


class TooManyWaitingError(InputError):
    """An owner would have more waiting jobs than allowed; nothing was stored or enqueued."""


def check_max_waiting(connection: redis.Redis, entries: Iterable[Entry], limit: int | None) -> None:
    """Raise TooManyWaitingError if new jobs would be more than their owners may have waiting; None: any number.

    Submissions at the same moment do not see each other.
    """
    found = foresee(connection, entries) if limit is not None else ()
    numbers = Counter(each.entry.owner for each in found if each.is_new)
    if limit is None or not numbers:
        return
    waiting = Counter(owners_of(connection, newest_ids(connection, statuses=WAITING)))
    for owner, number in numbers.items():
        room = max(0, limit - waiting[owner])
        if number > room:
            whose = f"{owner} has" if owner else "Jobs without an owner:"
            most = f"{room:,} at most" if room else "later"
            raise TooManyWaitingError(
                f"{whose} {waiting[owner]:,} waiting of the {limit:,} that SVDQ_MAX_WAITING allows, and "
                f"{number:,} more would be too many, so nothing was submitted; submit {most}."
            )


def estimate_of(snapshot: Snapshot, jobs: Sequence[Job], num_jobs: int, at: datetime | None, now: datetime) -> Estimate:
    """Estimate when so many jobs like `jobs`, that are not queued before `at`, will be done, after all that waits."""
    some = jobs[:: len(jobs) // MOST_READ + 1]
    parameters = [job.model_dump(mode="json") for job in some]
    common = (snapshot.groups, snapshot.pauses, snapshot.no_group)
    if at is None:
        in_flight = [job for job in snapshot.jobs if job.is_readable]
        return estimate_all(in_flight, with_more(snapshot.waiting, parameters, num_jobs), *common)
    alone = estimate_all([], with_more(Backlog(), parameters, num_jobs), *common)
    begin_s = max(0.0, (at - now).total_seconds(), snapshot.estimate.eta_s or 0.0)
    return alone if alone.eta_s is None else Estimate(eta_s=begin_s + alone.eta_s, reason=alone.reason)
