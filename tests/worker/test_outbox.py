"""The outbox of webhooks: each change of a video is in it with the change, once, and it stays small."""

import pytest
import redis

from svdq.producer import job_control, keys, lua
from svdq.producer.job_control import cancel, cancel_many
from svdq.producer.results.remove import forget
from svdq.producer.submitting.enqueue import enqueue_chain
from svdq.producer.submitting.entries import Entry
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from tests.worker.jobs import JOB, pop, put


@pytest.fixture(autouse=True)
def wanted(connection: redis.Redis) -> None:
    connection.set(keys.WEBHOOKS_WANTED, "1")


def events(connection: redis.Redis) -> list[str]:
    """The events in the outbox, oldest first."""
    return [f"{fields[b'id'].decode()} {fields[b'type'].decode()}" for _, fields in connection.xrange(keys.WEBHOOKS)]


def new_events(connection: redis.Redis) -> list[str]:
    """The same, and empty it."""
    found = events(connection)
    connection.delete(keys.WEBHOOKS)
    return found


def test_each_change_is_an_event(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b", "c", "d", "e")
    put(connection, "a")
    assert new_events(connection) == [f"{job_id} video.created" for job_id in "abcde"]
    a, b, c = pop(worker), pop(worker), pop(worker)
    assert new_events(connection) == [f"{job_id} video.started" for job_id in "abc"]
    worker.fail(b, "It broke.")
    assert worker.finish([(a, {"outputs": []})]) == [True]
    worker.stop(c)
    cancel(connection, "d")
    assert [*cancel_many(connection, ["e"])] == [("e", "canceled")]
    ends = ["b video.failed", "a video.completed", "c video.failed", "d video.failed", "e video.failed"]
    assert new_events(connection) == ends
    connection.delete("rq:job:b")  # as if it had expired
    assert all(forget(connection, job_id) for job_id in "ab")
    assert new_events(connection) == ["a video.deleted", "b video.deleted"]


def test_a_job_that_is_held_no_longer_ends_without_an_event(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active = pop(worker)
    Recovery(worker).at_start([])
    assert worker.finish([(active, {"outputs": []})]) == [True]
    assert worker.finish([(active, {"outputs": []})]) == [False]
    assert events(connection) == [f"a video.{event}" for event in ("created", "started", "completed")]


def test_a_video_that_is_continued_was_started_before(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    worker.return_to_queue([pop(worker)])
    active = pop(worker)
    assert new_events(connection) == ["a video.created", "a video.started"]
    worker.fail(active, "It broke.")
    job_control.retry(connection, "a")
    pop(worker)
    assert new_events(connection) == ["a video.failed", "a video.started"], "a retried one is started again"


def test_a_job_that_waits_for_another_one(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    enqueue_chain(connection, [Entry(job=JOB, job_id="b", after=("a",))])
    worker.finish([(pop(worker), {"outputs": []})])
    assert events(connection) == ["a video.created", "b video.created", "a video.started", "a video.completed"]


def test_without_a_worker_that_sends_them_there_are_none(connection: redis.Redis, worker: GroupWorker) -> None:
    connection.delete(keys.WEBHOOKS_WANTED)
    put(connection, "a")
    worker.finish([(pop(worker), {"outputs": []})])
    forget(connection, "a")
    assert not connection.exists(keys.WEBHOOKS)


def test_the_newest_events_are_kept(connection: redis.Redis) -> None:
    for _ in range(12):
        many = "for i = 1, 10000 do add_event(ARGV[1], '0123456789abcdef0123' .. i) end"
        connection.eval(f"{lua.source('add_event')}\n{many}", 0, "video.created")
    put(connection, "the-newest")
    assert 100_000 <= connection.xlen(keys.WEBHOOKS) < 101_000
    assert connection.memory_usage(keys.WEBHOOKS) < 10_000_000
    assert connection.xrevrange(keys.WEBHOOKS, count=1)[0][1][b"id"] == b"the-newest"
    assert 0 < connection.ttl(keys.WEBHOOKS) <= keys.WEBHOOKS_TTL_S
