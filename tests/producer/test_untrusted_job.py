"""Job records that anyone with access to Redis may have written."""

import pytest
import redis
from rq.exceptions import NoSuchJobError

from svdq.pipeline.errors import InputError
from svdq.producer.queue import fetch, read_job
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from svdq.producer.untrusted_job import AT_ONCE, UnreadableJobError, UntrustedJob, read_many
from tests.queued import JOB, enqueue

RECORD = "rq:job:bad"


@pytest.fixture
def record(connection: redis.Redis) -> redis.Redis:
    """A job of ours, `bad`, whose record a test may spoil."""
    enqueue(connection, JOB, "bad")
    return connection


@pytest.mark.parametrize("fields", [{"type": 9}, {"type": 1, "return_value": "e30"}, {"a": "b"}])
def test_a_malformed_result_is_none(record: redis.Redis, fields: dict[str, object]) -> None:
    record.xadd("rq:results:bad", {name: str(value).encode(errors="surrogateescape") for name, value in fields.items()})
    assert fetch(record, "bad").latest_result() is None


def test_results_under_a_foreign_key_are_none(record: redis.Redis) -> None:
    record.set("rq:results:bad", "x")
    assert fetch(record, "bad").latest_result() is None


def test_a_record_under_an_id_that_rq_refuses_cannot_be_read(connection: redis.Redis) -> None:
    for job_id in (b"\xff", b"a b", b""):
        connection.hset(b"rq:job:" + job_id, "data", "x")
    for found in read_many(connection, [b"\xff", "a b", ""]):
        assert isinstance(found, UnreadableJobError)


def test_many_jobs_are_read_in_their_order(connection: redis.Redis) -> None:
    ids = [f"job-{number}" for number in range(AT_ONCE + 7)]
    enqueue_many(connection, [Entry(job=JOB, job_id=job_id) for job_id in ids])
    assert [job.id for job in read_many(connection, reversed(ids))] == ids[::-1]


def test_a_missing_job(connection: redis.Redis) -> None:
    with pytest.raises(NoSuchJobError) as raised:
        UntrustedJob.fetch("none", connection=connection)
    assert not isinstance(raised.value, UnreadableJobError)
    with pytest.raises(InputError, match="There is no job 'none'"):
        fetch(connection, "none")


def test_a_meta_that_is_pickled_is_dropped(record: redis.Redis) -> None:
    """As RQ's tools write it without our class of queues."""
    record.hset(RECORD, "meta", b"\x80\x04]")
    job = fetch(record, "bad")
    assert job.meta == {}
    assert read_job(job) == JOB
