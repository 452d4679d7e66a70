"""What Redis knows of the jobs whose files `svdq prune` may remove."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import redis
from rq.job import JobStatus
from rq.utils import as_text

from svdq.pipeline.errors import InputError
from svdq.producer.job import INPUT_KEY
from svdq.producer.queue import ENDED, fetch, read_job, statuses
from svdq.producer.status.registries import scan_ids
from svdq.producer.untrusted_job import UnreadableJobError, key_of, read_many

#: In JSON as it stands, which need not be parsed for this.
_INPUT_KEY = re.compile(INPUT_KEY.pattern.encode())


@dataclass(frozen=True, kw_only=True)
class KnownJobs:
    """What Redis knows of all jobs, as far as their files are concerned."""

    #: Ids of jobs that are still to be done, or of which nobody can say.
    unfinished: set[str] = field(default_factory=set)
    #: Keys of the photos of all jobs, ended ones included: those may be retried.
    images: set[str] = field(default_factory=set)
    #: Ids of ended jobs by the stem of their files.
    ended: dict[str, str] = field(default_factory=dict)


def images_in(data: bytes) -> set[str]:
    """Find the keys of photos in JSON of any shape."""
    return {image.decode() for image in _INPUT_KEY.findall(data)}


def read_jobs(connection: redis.Redis, on_bad: Callable[[str], None]) -> KnownJobs:
    """Read all jobs there are."""
    jobs = KnownJobs()
    for found in read_many(connection, scan_ids(connection), fields=("status", "ended_at", "data")):
        if isinstance(found, UnreadableJobError):
            on_bad(f"{found} It is left out.")
            jobs.unfinished.add(found.job_id)
        elif found is not None:
            jobs.images.update(images_in(found.data))
            if found.get_status(refresh=False).value not in ENDED:
                jobs.unfinished.add(found.id)
            elif (job := read_job(found)) is not None:
                jobs.ended[job.output_stem(found.id)] = found.id
    return jobs


def is_unfinished(connection: redis.Redis, job_id: str) -> bool:
    """Whether a job is still to be done."""
    (status,) = statuses(connection, [job_id])
    return status is not None and status not in ENDED


def forget(connection: redis.Redis, job_id: str) -> bool:
    """Have Redis forget a finished job whose files go, so that the same submission renders anew.

    Returns False when the job has just been queued again, or its record cannot be read.
    """
    key = key_of(job_id)
    if not connection.exists(key):
        return True
    try:
        job = fetch(connection, job_id)
    except InputError:
        return False  # its record cannot be read
    with connection.pipeline() as pipeline:
        pipeline.watch(key)  # type: ignore[no-untyped-call]
        status = as_text(connection.hget(key, "status") or b"")
        if status != JobStatus.FINISHED.value:
            return status in ENDED
        pipeline.multi()
        job.delete(pipeline=pipeline)
        try:
            pipeline.execute()
        except redis.WatchError:
            return False
    return True
