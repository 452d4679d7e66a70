"""Jobs in their queues in every state, with no photo, worker or file behind them."""

import time
from datetime import UTC, datetime

import redis
import rq
from rq.job import JobStatus
from rq.results import Result
from rq.utils import utcformat

from svdq.producer import keys
from svdq.producer.job import JOBS, Job
from svdq.producer.queue import SvdqQueue, fetch, read_job
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry

SvdJob, WanJob = JOBS["svd"], JOBS["wan"]
JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4)
NOTICE = "preview (no diffusion model)"


def enqueue(connection: redis.Redis, job: Job, job_id: str, priority: str = "default") -> rq.job.Job:
    """Enqueue one job; the one that is there already is returned as it is."""
    enqueue_many(connection, [Entry(job=job, job_id=job_id, priority=priority)])
    return fetch(connection, job_id)


def add(connection: redis.Redis, number: int, priority: str = "default", **fields: object) -> rq.job.Job:
    """Enqueue a job whose id is a number."""
    return enqueue(connection, JOB.model_copy(update=fields), f"{number:020x}", priority)


def start(job: rq.job.Job, **meta: object) -> None:
    """Have a job in flight, as a group has."""
    queue = SvdqQueue(job.origin, connection=job.connection)
    queue.remove(job)
    job.meta = meta
    job.save_meta()
    job.set_status(JobStatus.STARTED)
    job.connection.zadd(queue.started_job_registry.key, {f"{job.id}:execution": time.time() + 3600})


def finish(job: rq.job.Job, value: object = None, at: float | None = None) -> None:
    """End a job as a worker does, now or at another time."""
    _end(job, JobStatus.FINISHED, at)
    value = value or {"outputs": ["/videos/a b.mp4"], "notice": NOTICE}
    Result.create(job, Result.Type.SUCCESSFUL, ttl=-1, return_value=value)


def write_files(storage: Storage, rq_job: rq.job.Job) -> None:
    """Write something as the files of a job."""
    job = read_job(rq_job)
    assert job is not None
    for key in (job.sidecar_key(rq_job.id), *job.output_keys(rq_job.id).values()):
        storage.write_bytes(key, b"{}")


def fail(
    job: rq.job.Job,
    reason: str = "x.SampleError: The frames are black.",
    at: float | None = None,
    status: JobStatus = JobStatus.FAILED,
) -> None:
    """Have a job fail, or be stopped, as in a worker."""
    _end(job, status, at)
    Result.create_failure(job, ttl=-1, exc_string=reason)


def _end(job: rq.job.Job, status: JobStatus, at: float | None) -> None:
    queue = SvdqQueue(job.origin, connection=job.connection)
    queue.remove(job)
    job.set_status(status)
    if at is not None or job.ended_at is None:
        job.ended_at = datetime.fromtimestamp(time.time() if at is None else at, UTC)
        job.connection.hset(job.key, "ended_at", utcformat(job.ended_at))
    # As RQ scores it: by when it expires.
    registry, ttl_s = queue.failed_job_registry, keys.FAILURE_TTL_S
    if status is JobStatus.FINISHED:
        registry, ttl_s = queue.finished_job_registry, keys.RESULT_TTL_S
    job.connection.zadd(registry.key, {job.id: int(job.ended_at.timestamp()) + ttl_s})
