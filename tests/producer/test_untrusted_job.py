"""Job records that anyone with access to Redis may have written: read in bounded memory, or not at all."""

import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import redis
from rq.exceptions import NoSuchJobError
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import InputError
from svdq.producer.job import SvdJob
from svdq.producer.queue import fetch, read_job
from svdq.producer.submitting.enqueue import Entry, enqueue_many
from svdq.producer.untrusted_job import AT_ONCE, MAX_BYTES, UnreadableJobError, UntrustedJob, read_many
from tests.queued import enqueue

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)
RECORD = "rq:job:bad"


def bomb() -> bytes:
    """Some 250 kB that decompress to 256 MiB."""
    compressor = zlib.compressobj(9)
    zeros = bytes(1 << 20)
    return b"".join(compressor.compress(zeros) for _ in range(256)) + compressor.flush()


@pytest.fixture(scope="module")
def large() -> bytes:
    return bomb()


@pytest.fixture
def peak_bytes() -> Iterator[object]:
    """Ask how much memory Python has taken at most since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.fixture
def record(connection: redis.Redis) -> redis.Redis:
    """A job of ours, `bad`, whose record a test may spoil."""
    enqueue(connection, JOB, "bad")
    return connection


def test_a_job_of_ours_is_read_whole(record: redis.Redis) -> None:
    job = fetch(record, "bad")
    assert isinstance(job, UntrustedJob)
    assert read_job(job) == JOB
    assert (job.retries_left, job.origin) == (3, "svdq-default")


@pytest.mark.parametrize("field", ["data", "exc_info"])
@pytest.mark.parametrize("wrap", [bytes, zlib.compress], ids=["once", "twice"])
def test_a_field_that_decompresses_to_much_is_not_read(record: redis.Redis, large, peak_bytes, field, wrap) -> None:
    record.hset(RECORD, field, wrap(large))
    if wrap is bytes:
        with pytest.raises(UnreadableJobError, match="a compressed field holds more than 1048576 bytes"):
            UntrustedJob.fetch("bad", connection=record, serializer=JSONSerializer)
    else:
        UntrustedJob.find("bad", record)
    assert peak_bytes() < 16 * MAX_BYTES


def test_a_result_that_decompresses_to_much_is_not_read(record: redis.Redis, large, peak_bytes) -> None:
    record.xadd("rq:results:bad", {"type": 2, "exc_string": b64encode(large), "worker_name": "x"})
    assert fetch(record, "bad").latest_result() is None
    assert peak_bytes() < 16 * MAX_BYTES


@pytest.mark.parametrize(
    "fields",
    [{"type": 9}, {"type": 2, "exc_string": "?"}, {"type": 1, "return_value": "e30"}, {"a": "b"}, {"type": "\udcff"}],
)
def test_a_malformed_result_is_none(record: redis.Redis, fields: dict[str, object]) -> None:
    record.xadd("rq:results:bad", {name: str(value).encode(errors="surrogateescape") for name, value in fields.items()})
    assert fetch(record, "bad").latest_result() is None


def test_results_under_a_foreign_key_are_none(record: redis.Redis) -> None:
    record.set("rq:results:bad", "x")
    assert fetch(record, "bad").latest_result() is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda record: record.hset(RECORD, "meta", bytes(4 << 20)), "it has more than 1048576 bytes"),
        (lambda record: record.hset(RECORD, "unknown", bytes(4 << 20)), "it has more than 1048576 bytes"),
        (lambda record: record.hset(RECORD, mapping=dict.fromkeys(map(str, range(300)), 1)), "more than 200 fields"),
        (lambda record: record.hdel(RECORD, "data"), "it has no data"),
        (lambda record: (record.delete(RECORD), record.rpush(RECORD, "x")), "it is a list"),
        (lambda record: record.hset(RECORD, b"\xff", "x"), "UnicodeDecodeError"),
        (lambda record: record.hset(RECORD, "status", "dancing"), "ValueError"),
        (lambda record: record.hset(RECORD, "created_at", "yesterday"), "ValueError"),
        (lambda record: record.hset(RECORD, "retry_intervals", "[" * 100_000), "RecursionError|JSONDecodeError"),
    ],
)
def test_unreadable_records_are_reported_and_harm_no_other(record: redis.Redis, spoil, reason, peak_bytes) -> None:
    enqueue(record, JOB, "good")
    spoil(record)
    with pytest.raises(UnreadableJobError, match=reason):
        UntrustedJob.fetch("bad", connection=record, serializer=JSONSerializer)
    with pytest.raises(InputError, match=r"The record of job 'bad' cannot be read: .* del rq:job:bad` removes it"):
        fetch(record, "bad")
    ids = ["good", "bad", "none", b"\xff", "a b", "", "good"]
    found = UntrustedJob.fetch_many(ids, record)
    assert [job and job.id for job in found] == ["good", None, None, None, None, None, "good"]
    good, bad, *none, _ = read_many(record, ids)
    assert isinstance(good, UntrustedJob)
    assert isinstance(bad, UnreadableJobError)
    is_known = record.type(RECORD) == b"hash" and record.hget(RECORD, "status") == b"queued"
    assert (bad.job_id, bad.status) == ("bad", "queued" if is_known else "unknown")
    assert none == [None] * 4
    assert peak_bytes() < 16 * MAX_BYTES


def test_only_some_fields_are_read(record: redis.Redis) -> None:
    """What is not read may be as large as it likes; what is read may not, and a missing field has RQ's default."""
    record.hset(RECORD, "unknown", bytes(4 << 20))
    (job,) = read_many(record, ["bad"], fields=("status", "ended_at", "data"))
    assert isinstance(job, UntrustedJob)
    assert (job.get_status(refresh=False), job.ended_at, read_job(job)) == ("queued", None, JOB)
    record.hset(RECORD, "data", bytes(4 << 20))
    (bad,) = read_many(record, ["bad"], fields=("status", "data"))
    assert isinstance(bad, UnreadableJobError)
    assert bad.status == "queued"


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


@pytest.mark.parametrize(
    ("field", "value", "attribute", "expected"),
    [
        ("meta", b"[1]", "meta", {}),
        ("meta", b"\x80", "meta", {}),
        ("meta", b"[" * 100_000, "meta", {}),
        ("created_at", "0001-01-01T00:00:00.000000Z", "created_at", datetime(1970, 1, 1, tzinfo=UTC)),
        ("ended_at", "9999-12-31T23:59:59.000000Z", "ended_at", None),
        ("result_ttl", 10**30, "result_ttl", None),
        ("failure_ttl", -7, "failure_ttl", None),
        ("retry_intervals", '["x"]', "retry_intervals", None),
        ("retry_intervals", "[-5]", "retry_intervals", None),
        ("retry_intervals", "7", "retry_intervals", None),
        ("repeat_intervals", '{"a": 1}', "repeats_left", None),
        ("dependency_ids", "7", "dependency_ids", []),
    ],
)
def test_an_invalid_value_is_dropped(record: redis.Redis, field: str, value, attribute: str, expected) -> None:
    record.hset(RECORD, field, value)
    job = fetch(record, "bad")
    assert getattr(job, attribute) == expected
    assert read_job(job) == JOB
