"""Removes one job with its files, wherever it is on its way."""

import contextlib
from collections.abc import Collection

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.producer.control import cancel
from svdq.producer.job import Job
from svdq.producer.queue import ENDED, fetch, fetch_many, is_ours, no_such_job, read_job
from svdq.producer.results import verdicts
from svdq.producer.storage.storage import Storage
from svdq.producer.untrusted_job import key_of

#: Adds to the claims on a job. KEYS: job. ARGV: field, number. Returns the sum, or nil without a job or below zero.
_CLAIM = """
local claims = tonumber(redis.call('hget', KEYS[1], ARGV[1]) or 0) + ARGV[2]
if redis.call('exists', KEYS[1]) == 0 or claims < 0 then
  return nil
end
redis.call('hset', KEYS[1], ARGV[1], claims)
return claims
"""


def claim(connection: redis.Redis, job_id: str) -> bool:
    """Record that somebody else relies on a job, so that it outlives one `release`; return False if there is no job."""
    return connection.eval(_CLAIM, 1, key_of(job_id), keys.CLAIMS_FIELD, 1) is not None


def release(connection: redis.Redis, job_id: str) -> bool:
    """Take back a claim; return False if there was none, so that nobody relies on the job any more."""
    return connection.eval(_CLAIM, 1, key_of(job_id), keys.CLAIMS_FIELD, -1) is not None


def remove_job(connection: redis.Redis, storage: Storage, job_id: str) -> bool:
    """Cancel a job that has not ended; remove the record, the verdict and the files of one that has.

    Only files that svdq has made are removed. Its photo stays, since other jobs may have the same one; `svdq prune`
    removes it later.

    Returns:
        False if it is in flight: it stops after its current step, and can be removed then.

    Raises:
        InputError: there is no such job, or its record cannot be read.
        UnavailableError: the storage cannot be reached.
    """
    while True:
        rq_job = fetch(connection, job_id)
        if not is_ours(rq_job):
            raise no_such_job(job_id)
        if rq_job.get_status(refresh=False).value not in ENDED:
            with contextlib.suppress(InputError):  # it has just ended
                if cancel(connection, job_id) == "stopping":
                    return False
            continue
        job = read_job(rq_job)
        sidecar = None if job is None else f"{job.output_stem(job_id)}.json"
        files = [] if job is None else _files_of(storage, job, job_id)
        if sidecar is not None:
            storage.remove(sidecar)  # first: its presence means that the files are complete
        # The record before the files: a new job of the same id may write its own.
        if forget(connection, job_id):
            for key in files:
                storage.remove(key)
            verdicts.give(connection, [job_id], None)
            return True


def _files_of(storage: Storage, job: Job, job_id: str) -> list[str]:
    """Return the keys of what svdq has written for a job, which does not include files that others have added."""
    stem = job.output_stem(job_id)
    files = [f"{stem}.{kind}" for kind in job.formats if kind != "png"]
    if "png" in job.formats:
        entries = list(storage.entries(stem))
        frames = [entry.key for entry in entries if entry.key.rpartition("/")[2].startswith("frame_")]
        # A folder of frames is removed as a whole, unless somebody has added files.
        files += frames if len(frames) < len(entries) else [stem]
    return files


def forget(connection: redis.Redis, job_id: str, only: Collection[str] = ENDED) -> bool:
    """Delete the record of an ended job, so that the same submission renders again.

    Nothing is done if there is no record, or if the job ended in a status that is not in `only`.

    Returns:
        False if the job has not ended, such as when it has just been queued again.

    Raises:
        InputError: its record cannot be read.
    """
    with connection.pipeline() as pipeline:
        pipeline.watch(key_of(job_id))  # type: ignore[no-untyped-call]
        (job,) = fetch_many(connection, [job_id])
        if job is None:
            return True
        status = job.get_status(refresh=False).value
        if status not in ENDED:
            return False
        if status not in only:
            return True
        if status == JobStatus.CANCELED.value and connection.scard(job.dependents_key):
            return True  # jobs wait for it, until it is retried or they are canceled
        pipeline.multi()
        job.delete(pipeline=pipeline)
        try:
            pipeline.execute()
        except redis.WatchError:
            return False
    return True
