"""Jobs are queued when they are due, once and in order, by any group: against a real Redis."""

from datetime import UTC, datetime, timedelta

import pytest
import redis
import rq

from svdq.producer import job_control
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.submitting.enqueue import Entry, enqueue_many
from svdq.worker.queue import group_worker, scripts
from svdq.worker.queue.group_worker import GroupWorker
from tests.worker.jobs import JOB, pop, waiting


def schedule(connection: redis.Redis, *job_ids: str, in_s: float = -10.0, priority: str = "default", **more) -> None:
    """Schedule jobs as any user of RQ does, all for the same time."""
    queue = SvdqQueue(f"svdq-{priority}", connection=connection)
    due_at = datetime.now(UTC) + timedelta(seconds=in_s)
    for job_id in job_ids:
        queue.enqueue_at(due_at, RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, **more)


def scheduled(connection: redis.Redis) -> list[bytes]:
    return connection.zrange("rq:scheduled:svdq-default", 0, -1)


# What is queued, and in which order.


def test_due_jobs_are_queued_by_priority_and_age(connection: redis.Redis, worker: GroupWorker) -> None:
    schedule(connection, "z", "m", "a")  # the time is the same: the order is that of submission, not of the ids
    schedule(connection, "earlier", in_s=-20)
    schedule(connection, "urgent", priority="high")
    schedule(connection, "later", in_s=3600)
    assert waiting(connection) == []

    worker.promote_due()

    assert waiting(connection) == ["earlier", "z", "m", "a"]
    assert waiting(connection, "high") == ["urgent"]
    assert scheduled(connection) == [b"later"]
    job = fetch(connection, "z")
    assert job.get_status().value == "queued"
    assert job.enqueued_at is not None
    assert fetch(connection, "later").get_status().value == "scheduled"
    # To a group they are jobs as any others.
    assert [pop(worker).rq_job.id for _ in range(3)] == ["urgent", "earlier", "z"]


def test_due_jobs_of_several_owners_take_turns(connection: redis.Redis, worker: GroupWorker) -> None:
    def submit(job_ids: str, at: datetime | None = None) -> None:
        enqueue_many(connection, [Entry(job=JOB, job_id=each, owner=each[0], at=at) for each in job_ids.split()])

    submit("a0 b0 a1")
    submit("a2 a3 a4 b1 b2 b3 c0", datetime.now(UTC) - timedelta(seconds=10))
    worker.promote_due()
    assert waiting(connection) == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3", "b3", "a4"]


def test_a_job_for_the_front_goes_there(connection: redis.Redis, worker: GroupWorker) -> None:
    SvdqQueue("svdq-default", connection=connection).enqueue(RENDER, job_id="waits")
    schedule(connection, "front", at_front=True)
    worker.promote_due()
    assert waiting(connection) == ["front", "waits"]


def test_groups_that_promote_at_once_queue_each_job_once_and_in_order(
    connection: redis.Redis, worker: GroupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_worker, "PROMOTED_AT_ONCE", 2)
    job_ids = [f"job{9 - number}" for number in range(10)]
    schedule(connection, *job_ids)
    assert worker.promote_due()
    assert len(waiting(connection)) == 2
    other = GroupWorker(connection)
    while worker.promote_due() | other.promote_due():
        pass
    assert waiting(connection) == job_ids


# Jobs that anyone may have changed.

CHANGES = {
    "canceled": lambda connection: job_control.cancel(connection, "bad"),
    "canceled by RQ": lambda connection: fetch(connection, "bad").cancel(),
    "deleted": lambda connection: connection.delete("rq:job:bad"),
    "no hash": lambda connection: (connection.delete("rq:job:bad"), connection.set("rq:job:bad", "x")),
    "begun": lambda connection: connection.hset("rq:job:bad", "status", "started"),
    "no id": lambda connection: connection.zadd("rq:scheduled:svdq-default", {b"\xff": 1}),
    "no registry": lambda connection: connection.set("rq:scheduled:svdq-high", "x"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_job_keeps_no_other_waiting(connection: redis.Redis, worker: GroupWorker, what: str) -> None:
    schedule(connection, "bad", in_s=-100)
    schedule(connection, "good")
    CHANGES[what](connection)

    worker.promote_due()

    expected = ["bad", "good"] if what in ("no id", "no registry") else ["good"]
    assert waiting(connection) == expected
    assert scheduled(connection) == []


def test_a_job_that_was_put_off_meanwhile_is_not_queued(connection: redis.Redis, worker: GroupWorker) -> None:
    schedule(connection, "a", in_s=3600)
    queue = SvdqQueue("svdq-default", connection=connection)
    with connection.pipeline() as pipeline:
        scripts.promote(pipeline, queue, [b"a"])
        assert pipeline.execute() == [0]
    assert scheduled(connection) == [b"a"]


@pytest.mark.parametrize("interval", [0, 60])
def test_rqs_retry_is_not_used(connection: redis.Redis, worker: GroupWorker, interval: int) -> None:
    """The same seed would fail again."""
    queue = SvdqQueue("svdq-default", connection=connection)
    for job_id in ("a", "b"):
        retry = rq.Retry(max=2, interval=interval)
        queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, retry=retry)
    worker.fail(pop(worker), "It broke.")
    worker.stop(pop(worker))
    assert [fetch(connection, job_id).get_status().value for job_id in ("a", "b")] == ["failed", "stopped"]
    assert (waiting(connection), scheduled(connection), connection.zcard("rq:wip:svdq-default")) == ([], [], 0)


# Real groups.


@pytest.mark.long
def test_a_burst_renders_due_jobs_and_counts_those_left(site) -> None:
    job = fetch(site.connection, site.submit()).kwargs
    queue = SvdqQueue("svdq-default", connection=site.connection)
    now = datetime.now(UTC)
    queue.enqueue_at(now - timedelta(hours=1), RENDER, kwargs=job, job_id="due")
    for job_id in ("later", "much-later"):
        queue.enqueue_at(now + timedelta(hours=1), RENDER, kwargs=job, job_id=job_id)

    group = site.start(1, "--burst")
    assert group.end() == 0

    assert site.view("due").status == "finished"
    assert site.states(["later", "much-later"]) == ["scheduled"] * 2
    assert "The queue is empty; scheduled for later: 2." in group.text
    assert "Queued what was due: 1 job." in group.text
