from typing import Any

import pytest
import redis
import rq
from rq.job import JobStatus
from rq.results import Result

from svdq.producer.job import Job
from svdq.producer.queue import SvdqQueue, enqueue, fetch
from svdq.producer.status import last_sentence, list_jobs, view, view_many, view_queues, view_workers

JOB = Job(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4)


def add(connection: redis.Redis, number: int, priority: str = "default") -> rq.job.Job:
    return enqueue(connection, JOB, f"{number:020x}", priority)


def finish(job: rq.job.Job, value: dict[str, Any]) -> None:
    """Do what our worker does at the end of a job."""
    queue = SvdqQueue(job.origin, connection=job.connection)
    queue.remove(job)
    job.set_status(JobStatus.FINISHED)
    Result.create(job, Result.Type.SUCCESSFUL, ttl=100, return_value=value)
    queue.finished_job_registry.add(job, 100)


def fail(job: rq.job.Job, reason: str) -> None:
    queue = SvdqQueue(job.origin, connection=job.connection)
    queue.remove(job)
    Result.create_failure(job, ttl=100, exc_string=reason)
    queue.failed_job_registry.add(job, ttl=100)
    job.set_status(JobStatus.FAILED)


def test_one_job_through_its_life(connection: redis.Redis) -> None:
    job = add(connection, 1)
    queued = view(connection, job.id).as_json()
    assert (queued["status"], queued["step"], queued["steps"], queued["outputs"]) == ("queued", 0, 4, [])
    assert queued.keys() >= Job.model_fields.keys()
    job.meta = {"step": 2, "rank": 3, "notice": "preview (no diffusion model)", "used": {"frames": 25}}
    job.save_meta()
    job.set_status(JobStatus.STARTED)
    started = view(connection, job.id)
    assert (started.step, started.rank, started.parameters["frames"]) == (2, 3, 25)
    assert started.notice == "preview (no diffusion model)"
    finish(job, {"outputs": ["/x.mp4"], "used": {"frames": 25, "decode_chunk_size": 5}, "notice": "preview"})
    done = view(connection, job.id)
    assert done.ended
    assert (done.step, done.outputs, done.error, done.rank) == (4, ("/x.mp4",), None, None)
    assert done.as_json()["decode_chunk_size"] == 5


def test_failure_is_a_sentence(connection: redis.Redis) -> None:
    job = add(connection, 1)
    fail(job, "Traceback …\n  File x\nsvdq.pipeline.errors.SampleError: The frames are black.\n\n")
    assert view(connection, job.id).error == "The frames are black."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ValueError: x: y", "x: y"),
        ("The photo: gone", "The photo: gone"),
        ("Photo: gone", "Photo: gone"),
        ("svdq.a.B: Word: z", "Word: z"),
        ("a\n\nplain sentence.\n", "plain sentence."),
    ],
)
def test_last_sentence(text: str, sentence: str) -> None:
    assert last_sentence(text) == sentence
    assert "log" in last_sentence("") == last_sentence(None)


def test_list_is_newest_first_over_all_states(connection: redis.Redis) -> None:
    jobs = [add(connection, number, ("high", "default", "low")[number % 3]) for number in range(9)]
    finish(jobs[0], {"outputs": []})
    fail(jobs[4], "No.")
    jobs[5].cancel()
    ids = [job.id for job in jobs]
    assert [job.id for job in list_jobs(connection)] == ids[::-1]
    assert [job.id for job in list_jobs(connection, limit=2)] == ids[:-3:-1]
    assert [job.id for job in list_jobs(connection, statuses=["failed"])] == [ids[4]]
    assert [job.id for job in view_many(connection, [ids[3], "none", ids[1]])] == [ids[3], ids[1]]
    counts = {queue.name: queue.counts for queue in view_queues(connection)}
    assert counts["svdq-high"]["finished"] == 1
    assert counts["svdq-high"]["queued"] == 2
    assert counts["svdq-default"]["failed"] == 1
    assert counts["svdq-low"]["canceled"] == 1


def test_foreign_jobs_are_shown_and_not_run(connection: redis.Redis) -> None:
    rq.Queue("svdq-default", connection=connection).enqueue("os.system", "true", job_id="pickled", meta={"a": 1})
    (foreign,) = list_jobs(connection)
    assert "not a job of svdq" in str(foreign.error)
    assert fetch(connection, "pickled").get_status() == "queued"


def test_workers(connection: redis.Redis) -> None:
    assert view_workers(connection) == []
    worker = rq.SimpleWorker(["svdq-default"], connection=connection, name="group", queue_class=SvdqQueue)
    other = rq.SimpleWorker(["else"], connection=connection, name="other")
    worker.register_birth()
    other.register_birth()
    (seen,) = view_workers(connection)
    assert (seen.name, seen.queues) == ("group", ["svdq-default"])
