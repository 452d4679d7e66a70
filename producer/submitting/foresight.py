"""What a submission would do, and when its videos would be done; submits nothing."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice

import redis

from svdq.producer.keys import UNRENDERED
from svdq.producer.queue import statuses
from svdq.producer.status.estimates import Backlog, Estimate, estimate_all, with_more
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.submitting.enqueue import CHUNK, Entry
from svdq.producer.submitting.job_spec import JobSpec


def existing(connection: redis.Redis, entries: Iterable[Entry]) -> Iterator[tuple[Entry, str, bool]]:
    """Yield each job with the status of the one that exists, "" without one, and whether it would be queued."""
    entries, seen = iter(entries), set()
    while chunk := list(islice(entries, CHUNK)):
        found = statuses(connection, [entry.job_id for entry in chunk])
        for entry, status in zip(chunk, found, strict=True):
            yield entry, status or "", (status is None or status in UNRENDERED) and entry.job_id not in seen
            seen.add(entry.job_id)


def estimate_of(snapshot: Snapshot, spec: JobSpec, num_videos: int, now: datetime) -> Estimate:
    """Estimate when videos that are not queued yet will be done, after all that waits already."""
    parameters = spec.example().model_dump(mode="json")
    common = (snapshot.groups, snapshot.pauses, snapshot.no_group)
    if spec.at is None:
        jobs = [job for job in snapshot.jobs if job.is_readable]
        return estimate_all(jobs, with_more(snapshot.waiting, parameters, num_videos), *common)
    alone = estimate_all([], with_more(Backlog(), parameters, num_videos), *common)
    begin_s = max(0.0, (spec.at - now).total_seconds(), snapshot.estimate.eta_s or 0.0)
    return alone if alone.eta_s is None else Estimate(eta_s=begin_s + alone.eta_s)
