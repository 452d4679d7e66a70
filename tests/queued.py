"""A job in its queue, with no photo in any storage behind it."""

import redis
import rq

from svdq.producer.job import Job
from svdq.producer.submitting.enqueue import Entry, enqueue_many


def enqueue(connection: redis.Redis, job: Job, job_id: str, priority: str = "default") -> rq.job.Job:
    """Enqueue one job; the one that is there already is returned as it is."""
    return enqueue_many(connection, [Entry(job=job, job_id=job_id, priority=priority)])[0].rq_job
