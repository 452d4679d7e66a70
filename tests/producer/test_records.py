"""What is logged about a job is kept with it: in order, capped, and no longer than the job itself."""

import redis

from svdq.producer import keys
from svdq.producer.job import SvdJob
from svdq.producer.job_control import cancel, retry
from svdq.producer.records import MAX_TEXT, LogEntry, append_log, read_log
from tests.queued import enqueue

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)


def entry(text: str, level: str = "INFO") -> LogEntry:
    return LogEntry.now(rank=1, host="here", level=level, text=text, at=1000.5)


def append(connection: redis.Redis, job_id: str, *entries: LogEntry) -> None:
    with connection.pipeline() as pipeline:
        append_log(pipeline, job_id, list(entries))
        pipeline.execute()


def test_entries_come_back_in_order_and_outlive_a_retry(connection: redis.Redis) -> None:
    enqueue(connection, JOB, "a")
    assert read_log(connection, "a") == []
    first = entry("It failed:\nTraceback …\r\n  “File”\x85", "ERROR")
    append(connection, "a", first, entry("two"))
    cancel(connection, "a")
    retry(connection, "a")
    append(connection, "a", entry("three"))
    assert read_log(connection, "a") == [first, entry("two"), entry("three")]


def test_a_job_that_is_gone_stays_gone(connection: redis.Redis) -> None:
    append(connection, "a", entry("late"))
    assert connection.keys("*") == []
    assert read_log(connection, "a") == []


def test_of_much_the_newest_is_kept(connection: redis.Redis) -> None:
    enqueue(connection, JOB, "a")
    for number in range(300):
        append(connection, "a", entry(f"line {number} {'x' * 100}"))
    kept = [int(found.text.split()[1]) for found in read_log(connection, "a")]
    assert kept == list(range(kept[0], 300))
    assert 50 < len(kept) < 300
    assert connection.hstrlen("rq:job:a", keys.LOG_FIELD) <= keys.LOG_BYTES
    append(connection, "a", entry(f"begin {'y' * 3 * MAX_TEXT} end"))
    last = read_log(connection, "a")[-1].text
    assert len(last) <= MAX_TEXT + 10
    assert (last[:5], last[-3:]) == ("begin", "end")
