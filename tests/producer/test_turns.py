"""Owners take turns in a queue: those who have three photos do not wait behind three hundred."""

from collections.abc import Iterable

import redis
from rq.job import JobStatus

from svdq.producer import job_control, keys
from svdq.producer.queue import SvdqQueue, fetch, queue_of
from svdq.producer.status.job_view import view
from svdq.producer.submitting.enqueue import enqueue_after, enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.queued import JOB, finish


def submit(connection: redis.Redis, job_ids: Iterable[str], priority: str = "default") -> None:
    """Enqueue jobs whose owner is the first character of their id."""
    enqueue_many(connection, [Entry(job=JOB, job_id=each, owner=each[0], priority=priority) for each in job_ids])


def waiting(connection: redis.Redis, priority: str = "default") -> list[str]:
    return queue_of(connection, priority).get_job_ids()


def test_three_do_not_wait_behind_three_hundred(connection: redis.Redis) -> None:
    submit(connection, [f"a{number}" for number in range(300)])
    submit(connection, ["b0", "b1", "b2"])
    assert waiting(connection)[:7] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]
    submit(connection, ["c0"])
    submit(connection, ["b3"])
    submit(connection, ["a300"])
    assert waiting(connection)[:9] == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert waiting(connection)[-2:] == ["a299", "a300"]
    assert len(waiting(connection)) == 306
    assert view(connection, "b1").owner == "b"


def test_turns_begin_anew_as_jobs_are_taken(connection: redis.Redis) -> None:
    submit(connection, ["a0", "a1", "a2", "a3"])
    submit(connection, ["b0"])
    connection.lpop("rq:queue:svdq-default", 3)  # a0, b0 and a1
    submit(connection, ["b1", "b2"])
    assert waiting(connection) == ["a2", "b1", "a3", "b2"]


def test_one_owner_is_first_come_first_served(connection: redis.Redis) -> None:
    enqueue_many(connection, [Entry(job=JOB, job_id=each) for each in ("old0", "old1")])  # as earlier versions do
    submit(connection, ["a0", "a1"])
    SvdqQueue("svdq-default", connection=connection).enqueue("some.program", job_id="rq")
    assert waiting(connection) == ["old0", "old1", "a0", "a1", "rq"]
    assert view(connection, "old0").owner == ""


def test_unfair_queues_are_first_come_first_served(connection: redis.Redis) -> None:
    connection.set(keys.UNFAIR, 1)
    submit(connection, ["a0", "a1"])
    submit(connection, ["b0"])
    assert waiting(connection) == ["a0", "a1", "b0"]


def test_moves_by_hand_win(connection: redis.Redis) -> None:
    submit(connection, ["a0", "a1", "a2", "a3"])
    job_control.move(connection, "a3", front=True, priority=None)
    job_control.place(connection, "a2", "a0")
    submit(connection, ["b0"])
    assert waiting(connection) == ["a3", "b0", "a2", "a0", "a1"]
    job_control.move(connection, "a1", front=True, priority=None)
    job_control.move(connection, "a3", front=True, priority=None)
    submit(connection, ["c0"])
    assert waiting(connection) == ["a3", "a1", "b0", "c0", "a2", "a0"]


def test_jobs_of_another_priority_take_their_turn_there(connection: redis.Redis) -> None:
    submit(connection, ["a0", "a1", "a2"], "high")
    submit(connection, ["b0", "b1"])
    for job_id in ("b0", "b1"):
        job_control.move(connection, job_id, front=False, priority="high")
    assert waiting(connection, "high") == ["a0", "b0", "a1", "b1", "a2"]


def test_retried_due_and_dependent_jobs_take_their_turn(connection: redis.Redis) -> None:
    submit(connection, ["b0", "b1", "b2"])
    enqueue_after(connection, Entry(job=JOB, job_id="b3", owner="b", after=("b2",)))
    list(job_control.cancel_many(connection, ["b0"]))
    parent = fetch(connection, "b2")
    SvdqQueue("svdq-default", connection=connection).remove(parent)
    submit(connection, ["a0", "a1", "a2", "a3"])
    assert waiting(connection) == ["b1", "a0", "a1", "a2", "a3"]
    job_control.retry(connection, "b0")
    finish(parent)
    parent.set_status(JobStatus.FINISHED)
    SvdqQueue("svdq-default", connection=connection).enqueue_dependents(parent)
    assert waiting(connection) == ["b1", "a0", "a1", "b0", "a2", "b3", "a3"]
    assert view(connection, "b3").owner == view(connection, "b0").owner == "b"


def test_an_unreadable_record_keeps_nobody_from_submitting(connection: redis.Redis) -> None:
    submit(connection, ["a0", "a1"])
    connection.lpush("rq:queue:svdq-default", "bad")
    connection.set("rq:job:bad", "text")
    submit(connection, ["b0"])
    assert waiting(connection) == ["bad", "a0", "b0", "a1"]
