"""The report of a run counts each job once."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import redis
from rq.utils import utcformat

from svdq.producer.results.run_report import RunRecord, RunReport, records_from_redis, summarize
from tests.queued import JOB, enqueue, finish

TEN = datetime(2027, 1, 30, 22, tzinfo=UTC)
SIX = TEN + timedelta(hours=8)


def after(minutes: float) -> datetime:
    return TEN + timedelta(minutes=minutes)


def record(number: int, minutes: float, status: str = "finished", **more: object) -> RunRecord:
    return RunRecord(id=f"{number:020x}", name=f"photo {number}", status=status, ended_at=after(minutes), **more)


def report(*records: RunRecord, **options: object) -> RunReport:
    return summarize(records, {"queued": 3}, since=TEN, until=SIX, **options)


def test_each_job_counts_once_as_it_ended_last() -> None:
    found = report(
        record(1, 10),  # as in the sidecar, and a little later as in Redis
        record(1, 10.01),
        record(2, 20, "failed", error="The photo is damaged."),
        record(2, 30),  # it was tried again
        record(3, 40),
        record(3, 50, "failed", error="No."),  # it was rendered again
        record(4, 60, "stopped"),
        record(5, 61, "canceled"),
        record(6, -1),
        record(7, 8 * 60 + 1, "failed"),
    )
    assert [job.id[-1] for job in found.jobs] == ["1", "2", "3", "4", "5"]
    assert (found.count("finished"), found.count("failed"), found.count("stopped", "canceled")) == (2, 1, 2)
    document = json.loads(json.dumps(found.as_json()))
    assert [document[name] for name in ("finished", "failed", "stopped", "canceled")] == [2, 1, 1, 1]
    assert document["left"] == {"queued": 3, "started": 0, "scheduled": 0, "deferred": 0}
    assert [job["error"] for job in document["jobs"]] == [None, None, "No.", None, None]
    assert document["jobs"][3]["status"] == "stopped"


def test_several_owners_have_a_line_each() -> None:
    found = report(
        record(1, 10, owner="ana"),
        record(1, 10.01),  # as in a sidecar of an earlier version
        record(2, 20, "failed", error="No.", owner="ben"),
        record(3, 30, owner="ana"),
        record(4, 40),
    )
    lines = found.lines()
    assert {"ana: 2 finished.", "ben: 1 failed.", "Without an owner: 1 finished."} <= {*lines}
    assert [job["owner"] for job in found.as_json()["jobs"]] == ["ana", "ben", "ana", ""]
    assert not [line for line in report(record(1, 10, owner="ana"), record(2, 20)).lines() if "ana" in line]


def test_the_pace_of_a_run_is_that_of_all_of_its_time() -> None:
    found = report(*(record(number, 30 * number) for number in range(1, 5)), ending="The queue was empty.")
    assert found.videos_per_hour == pytest.approx(0.5)


def test_the_pace_of_a_period_is_that_of_the_time_worked() -> None:
    found = report(
        record(1, 110, begun_at=after(100)),
        record(1, 110.01),  # the same end, as in Redis
        record(2, 120, begun_at=after(110)),
        record(3, 115),
    )
    assert found.videos_per_hour == pytest.approx(3 * 3)


def test_a_job_in_redis_begins_when_a_group_takes_it(connection: redis.Redis) -> None:
    """In rounds a video has others between its units, so its seconds of work do not say when it began."""
    job = enqueue(connection, JOB, "a" * 20)
    began, ended = after(0), after(10)
    connection.hset(job.key, "started_at", utcformat(began))
    finish(job, at=ended.timestamp())
    (found,) = records_from_redis(connection, TEN, SIX, pytest.fail)
    assert (found.begun_at, found.ended_at) == (began, ended)


def test_a_run_without_jobs_has_no_pace() -> None:
    found = report(ending="It ended because the queue was empty.")
    assert (found.videos_per_hour, found.jobs) == (None, ())
    assert found.lines() == [
        f"0 finished, 0 failed, 0 stopped, 0 canceled, {found.period}.",
        "It ended because the queue was empty.",
        "Left: 3 queued, 0 started, 0 scheduled, 0 deferred.",
    ]


def test_failures_tell_photos_of_one_name_apart() -> None:
    cameras = [record(1, 1, "failed", error="Black.", source="left/IMG_0001.jpg")]
    cameras.append(record(2, 2, "failed", error="Black.", source="right/IMG_0001.jpg"))
    last = report(*cameras).lines()[-1]
    assert last == f"Failed, 2 x: Black. left/IMG_0001.jpg ({1:020x}), right/IMG_0001.jpg ({2:020x})"


def test_failures_are_listed_by_reason_the_most_frequent_first() -> None:
    failures = [record(number, number, "failed", error="The frames are black.") for number in range(2, 9)]
    lines = report(record(1, 1, "failed", error="No memory."), *failures).lines()
    assert lines[-1] == f"Failed, 1 x: No memory. photo 1 ({1:020x})"
    assert lines[-2].startswith("Failed, 7 x: The frames are black. photo 2 (")
    assert lines[-2].endswith("photo 6 (00000000000000000006) and 2 more")
