"""Jobs that have ended without a worker: with real files, and with the records that RQ keeps of them."""

import json

import redis

from svdq.producer.job import parse_job
from svdq.producer.storage.storage import Storage
from tests import queued
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
    level: int = 0,
) -> str:
    """Put a finished job and its files where a worker leaves them; return its id."""
    job_id = add_video(storage, number, name=name, formats=formats, level=level)
    document = json.loads(storage.read(f"outputs/{name}-{job_id}.json"))
    job = enqueue(connection, parse_job(document["job"]), job_id, priority)
    queued.finish(job, {"outputs": document["outputs"], "model": "preview"}, at)
    return job_id
