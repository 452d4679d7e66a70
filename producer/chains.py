"""Chains: jobs of which each continues the video of the one before. Finds the links before and after a job."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import redis
import rq
from redis.client import Pipeline

from svdq.producer import keys
from svdq.producer.queue import fetch_many, read_job

if TYPE_CHECKING:
    from svdq.producer.job import Job
    from svdq.producer.storage.storage import Storage


def record_link(pipeline: Pipeline, job_id: str, later_id: str) -> None:
    """Record that a job continues the chain of another one, which exists; a job may be continued in several ways."""
    pipeline.hset(rq.job.Job.key_for(job_id), f"{keys.LATER_FIELD}{later_id}", "")
    pipeline.sadd(f"{keys.NEEDED}{job_id}", later_id)
    pipeline.expire(f"{keys.NEEDED}{job_id}", keys.FAILURE_TTL_S)


def later_links(connection: redis.Redis, job_ids: Iterable[str]) -> dict[str, str]:
    """Return all jobs that continue the chains of some jobs, the nearest first, with the one of these before each."""
    found: dict[str, str] = {}
    nearest = {job_id: job_id for job_id in job_ids}
    while nearest:
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in nearest:
                pipeline.hkeys(rq.job.Job.key_for(job_id))
            answers = pipeline.execute(raise_on_error=False)
        later = {
            field.decode(errors="replace").removeprefix(keys.LATER_FIELD): origin
            for origin, fields in zip(nearest.values(), answers, strict=True)
            if isinstance(fields, list)  # else the key is not of a job
            for field in fields
            if field.startswith(keys.LATER_FIELD.encode())
        }
        nearest = {job_id: origin for job_id, origin in later.items() if job_id not in found}
        found |= nearest
    return found


def link_before(rq_job: rq.job.Job) -> str:
    """Return the id of the link whose last frame is the photo of a job; "" if there is none."""
    job = read_job(rq_job)
    return job.predecessor if job else ""


def why_no_video_before(storage: "Storage", job: "Job") -> str:
    """Say why a link cannot be made: the files that it continues are gone; "" if they are there."""
    before = job.predecessor
    if not before:
        return ""
    has_sidecar = storage.exists(job.sidecar_key(before))
    # Without the folder of all photos, a disk is not mounted.
    if (has_sidecar and storage.exists(job.output_keys(before)["mp4"])) or not storage.exists("inputs"):
        return ""
    if has_sidecar:
        again = f"`svdq retry --force {before}` renders both"
        return f"It continues the video of job {before}, whose mp4 was removed; {again}."
    return (
        f"It continues the video of job {before}, which failed, was stopped or was removed; `svdq retry` that job, or "
        "submit the chain again."
    )


def links_without_video(connection: redis.Redis, rq_job: rq.job.Job) -> list[str]:
    """Return the links right before a job that have ended without a video, the first one first."""
    found: list[str] = []
    while job_id := link_before(rq_job):
        (before,) = fetch_many(connection, [job_id])
        if before is None or job_id in found or before.get_status(refresh=False).value not in keys.UNRENDERED:
            break
        found.insert(0, job_id)
        rq_job = before
    return found
