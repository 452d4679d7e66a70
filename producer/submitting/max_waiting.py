"""Limits how many jobs of an owner wait."""

from collections import Counter
from collections.abc import Iterable

import redis

from svdq.pipeline.errors import InputError
from svdq.producer.job_control import WAITING
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.selection import owners_of
from svdq.producer.submitting.enqueue import Entry
from svdq.producer.submitting.foresight import existing


class TooManyWaitingError(InputError):
    """An owner would have more waiting jobs than allowed; nothing was stored or enqueued."""


def check_max_waiting(connection: redis.Redis, entries: Iterable[Entry], limit: int | None) -> None:
    """Raise TooManyWaitingError if new jobs would be more than their owners may have waiting; None: any number.

    Submissions at the same moment do not see each other.
    """
    found = existing(connection, entries) if limit is not None else ()
    numbers = Counter(entry.owner for entry, _, is_new in found if is_new)
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
