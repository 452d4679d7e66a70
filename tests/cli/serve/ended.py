"""Jobs that have ended without a worker: with real files, and with the records that RQ keeps of them."""

from datetime import UTC, datetime

import redis
from rq.job import JobStatus
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.results import Result

from svdq.producer import keys
from svdq.producer.job import Job, parse_job
from svdq.producer.queue import SvdqQueue
from svdq.producer.results.finished_videos import find_results
from svdq.producer.storage.storage import Storage
from tests.finished import add_video
from tests.queued import enqueue


def finish(
    connection: redis.Redis,
    storage: Storage,
    number: int,
    *,
    name: str = "photo",
    formats: tuple[str, ...] = ("gif",),
    at: float = 1_700_000_000,
    priority: str = "default",
) -> str:
    """Put a finished job and its files where a worker leaves them; return its id."""
    job_id = add_video(storage, number, name=name, formats=formats)
    (result,) = find_results(storage, job_ids=[job_id])
    outputs = [storage.location(key) for key in result.outputs]
    _end(connection, parse_job(result.document.job), job_id, priority, at, {"outputs": outputs, "model": "preview"})
    return job_id


def fail(connection: redis.Redis, job: Job, job_id: str, at: float = 1_700_000_000) -> None:
    """Put a failed job where a worker leaves it."""
    _end(connection, job, job_id, "default", at, None)


def _end(
    connection: redis.Redis, job: Job, job_id: str, priority: str, at: float, value: dict[str, object] | None
) -> None:
    rq_job = enqueue(connection, job, job_id, priority)
    queue = SvdqQueue(rq_job.origin, connection=connection)
    connection.lrem(queue.key, 1, job_id)
    rq_job.started_at = rq_job.ended_at = datetime.fromtimestamp(at, UTC)
    rq_job.set_status(JobStatus.FINISHED if value else JobStatus.FAILED)
    rq_job.save()
    if value:
        Result.create(rq_job, Result.Type.SUCCESSFUL, ttl=-1, return_value=value)
        registry, ttl_s = FinishedJobRegistry(queue=queue), keys.RESULT_TTL_S
    else:
        Result.create_failure(rq_job, ttl=-1, exc_string=f"svdq.pipeline.errors.SampleError: {job.name} is broken.")
        registry, ttl_s = FailedJobRegistry(queue=queue), keys.FAILURE_TTL_S
    connection.zadd(registry.key, {job_id: int(at) + ttl_s})
