"""Jobs into real queues: once each, at once, at a set time, or after others."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import redis
from rq.job import JobStatus
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.keys import QUEUE_NAMES
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.status.job_view import view
from svdq.producer.status.selection import list_jobs
from svdq.producer.submitting.enqueue import enqueue_after, enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.queued import JOB


def entry(
    job_id: str, seed: int = 1, priority: str = "default", at: datetime | None = None, after: tuple[str, ...] = ()
) -> Entry:
    return Entry(job=JOB.model_copy(update={"seed": seed}), job_id=job_id, priority=priority, at=at, after=after)


def waiting(connection: redis.Redis, priority: str = "default") -> list[str]:
    return SvdqQueue(f"svdq-{priority}", connection=connection).get_job_ids()


def test_each_once_and_in_order(connection: redis.Redis) -> None:
    first = enqueue_many(connection, [entry("a", 1), entry("b", 2, "high"), entry("c", 3)])
    assert [enqueued.is_new for enqueued in first] == [True] * 3
    again = enqueue_many(connection, [entry("d", 4), entry("a", 9), entry("b", 9), entry("d", 9)])
    assert [enqueued.is_new for enqueued in again] == [True, False, False, False]
    assert [made.seed for made in again] == [4, 1, 2, 4]
    assert [made.status for made in again] == ["queued"] * 4
    assert waiting(connection) == ["a", "c", "d"]
    assert waiting(connection, "high") == ["b"]


def test_jobs_equal_those_that_rq_makes(connection: redis.Redis) -> None:
    enqueue_many(connection, [entry("ours", 5)])
    queue = SvdqQueue("svdq-default", connection=connection)
    theirs = queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id="theirs")
    ours = connection.hgetall("rq:job:ours")
    assert set(connection.hgetall("rq:job:theirs")) <= set(ours)
    job = fetch(connection, "ours")
    assert (job.timeout, job.retries_left, job.origin, job.func_name) == (-1, 3, "svdq-default", RENDER)
    assert abs((job.enqueued_at - theirs.enqueued_at).total_seconds()) < 60
    assert SvdqQueue.all(connection=connection) == [queue]


def test_at_a_set_time(connection: redis.Redis) -> None:
    at = datetime(2099, 1, 31, 22, tzinfo=UTC)
    past = datetime.now(UTC) - timedelta(seconds=2)
    enqueue_many(connection, [entry("later", at=at), entry("due", 2, "low", at=past)])
    assert waiting(connection) == waiting(connection, "low") == []
    (again,) = enqueue_many(connection, [entry("later")])
    assert not again.is_new
    seen = view(connection, "later")
    assert (seen.status, seen.scheduled_at, seen.ended) == ("scheduled", at, False)
    assert seen.as_json()["scheduled_at"] == "2099-01-31T22:00:00Z"
    assert [job.id for job in list_jobs(connection, statuses=("scheduled",))] == ["due", "later"]

    scheduler = RQScheduler(QUEUE_NAMES, connection=connection, serializer=JSONSerializer)
    scheduler.acquire_locks()
    scheduler.enqueue_scheduled_jobs()
    assert waiting(connection, "low") == ["due"]
    assert waiting(connection) == []
    due = view(connection, "due")
    assert (due.status, due.scheduled_at, due.parameters["seed"]) == ("queued", None, 2)


def test_after_others(connection: redis.Redis) -> None:
    enqueue_many(connection, [entry("a"), entry("b")])
    new = enqueue_after(connection, entry("c", 3, after=("a", "b")))
    assert (new.is_new, new.status) == (True, "deferred")
    assert waiting(connection) == ["a", "b"]
    seen = view(connection, "c")
    assert (seen.status, seen.after) == ("deferred", ("a", "b"))
    again = enqueue_after(connection, entry("c", 9, after=("a",)))
    assert (again.is_new, again.seed) == (False, 3)

    queue = SvdqQueue("svdq-default", connection=connection)
    for job_id, status in (("a", JobStatus.FINISHED), ("b", JobStatus.FAILED)):
        job = fetch(connection, job_id)
        job.set_status(status)
        queue.enqueue_dependents(job)
    assert waiting(connection) == ["a", "b", "c"]


@pytest.mark.parametrize("status", [JobStatus.FINISHED, JobStatus.FAILED])
def test_after_a_job_that_has_ended(connection: redis.Redis, status: JobStatus) -> None:
    enqueue_many(connection, [entry("a")])
    fetch(connection, "a").set_status(status)
    assert enqueue_after(connection, entry("b", after=("a",))).status == "queued"
    assert waiting(connection) == ["a", "b"]


def test_after_a_canceled_or_missing_job(connection: redis.Redis) -> None:
    enqueue_many(connection, [entry("a")])
    job_control.cancel(connection, "a")
    with pytest.raises(InputError, match="canceled"):
        enqueue_after(connection, entry("b", after=("a",)))
    with pytest.raises(InputError, match="no job 'x'"):
        enqueue_after(connection, entry("b", after=("x",)))
    assert not connection.exists("rq:job:b")


def test_an_unreadable_record_under_the_id(connection: redis.Redis) -> None:
    """The record is neither replaced nor obeyed, and the user learns how to remove it."""
    connection.hset("rq:job:bad", "created_at", "yesterday")
    entries = [Entry(job=JOB, job_id=job_id) for job_id in ("a", "bad", "b")]
    with pytest.raises(InputError, match=r"record of job 'bad' cannot be read: .* del rq:job:bad` removes it"):
        enqueue_many(connection, entries)
    with pytest.raises(InputError, match="record of job 'bad' cannot be read"):
        enqueue_after(connection, replace(entries[1], after=("a",)))
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == ["a", "b"]
    connection.delete("rq:job:bad")
    assert [enqueued.is_new for enqueued in enqueue_many(connection, entries)] == [False, True, False]


def test_failed_and_canceled_jobs_are_queued_again_as_asked_for(connection: redis.Redis) -> None:
    at = datetime(2099, 1, 1, tzinfo=UTC)
    enqueue_many(connection, [entry(job_id) for job_id in "abcdef"])
    for job_id in "abcd":
        job_control.cancel(connection, job_id)
    queue = SvdqQueue("svdq-default", connection=connection)
    for job_id, status in (("e", JobStatus.FAILED), ("f", JobStatus.FINISHED)):
        queue.remove(job_id)
        fetch(connection, job_id).set_status(status)
    again = enqueue_many(
        connection, [entry("a", 9), entry("b", 9, "high"), entry("c", 9, at=at), entry("e"), entry("f")]
    )
    again.append(enqueue_after(connection, entry("d", after=("a",))))
    assert [each.was for each in again] == ["canceled", "canceled", "canceled", "failed", "", "canceled"]
    assert [each.is_new for each in again] == [True, True, True, True, False, True]
    assert again[0].seed == 1, "as recorded"
    assert (waiting(connection), waiting(connection, "high")) == (["a", "e"], ["b"])
    assert view(connection, "c").scheduled_at == at
    assert view(connection, "d").after == ("a",)
    parent = fetch(connection, "a")
    parent.set_status(JobStatus.FAILED)
    queue.enqueue_dependents(parent)
    assert waiting(connection) == ["a", "e", "d"]
    assert not connection.zcard("rq:canceled:svdq-default")
