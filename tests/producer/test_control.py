"""Jobs canceled in bulk."""

from datetime import UTC, datetime, timedelta

import pytest
import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.queue import queues, statuses
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from svdq.producer.verdicts import ids_with_verdict, read_verdicts, record_verdict
from tests.queued import SvdJob, enqueue

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="x", seed=0)


def test_many_jobs_take_few_round_trips(connection: redis.Redis) -> None:
    ids = [f"job-{number}" for number in range(300)]
    enqueue_many(connection, [Entry(job=JOB, job_id=job_id) for job_id in ids])
    before = num_requests(connection)
    assert list(job_control.cancel_many(connection, ids)) == [(job_id, "canceled") for job_id in ids]
    assert num_requests(connection) - before < 20
    assert statuses(connection, ids) == ["canceled"] * 300
    assert sum(queue.count for queue in queues(connection)) == 0


def num_requests(connection: redis.Redis) -> int:
    """Number of transactions and of single reads that the server has seen."""
    found = connection.info("commandstats")
    return sum(found[name]["calls"] for name in ("cmdstat_exec", "cmdstat_hget", "cmdstat_watch") if name in found)


def test_each_job_ends_as_if_it_were_canceled_alone(connection: redis.Redis) -> None:
    for job_id in ("waits", "done", "runs", "foreign"):
        enqueue(connection, JOB, job_id)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    enqueue_many(connection, [Entry(job=JOB, job_id="later", at=tomorrow)])
    connection.hset("rq:job:done", "status", JobStatus.FINISHED.value)
    connection.hset("rq:job:runs", "status", JobStatus.STARTED.value)
    connection.zadd("rq:executions:runs", {"1": 9e12})
    connection.hset("rq:job:foreign", "origin", "another-queue")
    found = dict(job_control.cancel_many(connection, ["waits", "later", "runs", "done", "none", "foreign"]))
    assert [found[job_id] for job_id in ("waits", "later", "runs")] == ["canceled", "canceled", "stopping"]
    assert all(isinstance(found[job_id], InputError) for job_id in ("done", "none", "foreign"))
    assert statuses(connection, list(found)) == ["canceled", "canceled", "started", "finished", None, "queued"]


def test_a_job_is_moved_before_another_one_of_any_priority(connection: redis.Redis) -> None:
    for job_id, priority in (("a", "default"), ("b", "default"), ("c", "default"), ("d", "high"), ("e", "high")):
        enqueue_many(connection, [Entry(job=JOB, job_id=job_id, priority=priority)])
    job_control.place(connection, "c", "a")
    job_control.place(connection, "b", "e")
    waiting = {queue.name: queue.job_ids for queue in queues(connection)}
    assert waiting == {"svdq-high": ["d", "b", "e"], "svdq-default": ["c", "a"], "svdq-low": []}
    assert connection.hget("rq:job:b", "origin") == b"svdq-high"
    connection.lrem("rq:queue:svdq-high", 1, "d")  # a group has just taken it
    for job_id, before in (("a", "d"), ("d", "a"), ("a", "a")):
        with pytest.raises(InputError, match="cannot be moved"):
            job_control.place(connection, job_id, before)
    assert {queue.name: queue.job_ids for queue in queues(connection)} == waiting | {"svdq-high": ["b", "e"]}


def test_no_verdicts_and_foreign_ones_do_no_harm(connection: redis.Redis) -> None:
    record_verdict(connection, [], "keep")
    assert read_verdicts(connection, []) == []
    connection.hset("svdq:verdicts", mapping={"x": b"\xff", "y": "maybe"})
    assert read_verdicts(connection, ["x", "y"]) == [None, None]
    assert ids_with_verdict(connection, "keep") == set()
