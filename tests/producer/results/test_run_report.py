"""What a night's work came to: numbers that add up, each job once."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from svdq.producer.results.run_report import RenderCost, RunRecord, RunReport, summarize

TEN = datetime(2027, 1, 30, 22, tzinfo=UTC)
SIX = TEN + timedelta(hours=8)


def after(minutes: float) -> datetime:
    return TEN + timedelta(minutes=minutes)


def record(number: int, minutes: float, status: str = "finished", **more: object) -> RunRecord:
    return RunRecord(id=f"{number:020x}", name=f"photo {number}", status=status, ended_at=after(minutes), **more)


def cost(minutes: float, compute_s: float, group: str = "box:1", num_ranks: int = 2) -> RenderCost:
    return RenderCost(group=group, num_ranks=num_ranks, compute_s=compute_s, begun_at=after(minutes))


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


def test_a_run_is_measured_by_all_of_its_time_and_ranks() -> None:
    found = report(*(record(number, 30 * number, cost=cost(0, 7200)) for number in range(1, 5)), num_ranks=4)
    assert found.videos_per_hour == pytest.approx(0.5)
    assert found.busy_share == pytest.approx(4 * 7200 / (4 * 8 * 3600))


def test_a_stretch_of_time_is_measured_by_what_was_worked() -> None:
    # Two groups of two ranks: one worked for 20 minutes and the other, in between, for 10.
    found = report(
        record(1, 110, cost=cost(100, 600)),
        record(2, 120, cost=cost(110, 600)),
        record(3, 115, cost=cost(105, 1200, group="box:2")),
        record(4, 118),  # nobody wrote down what it cost
    )
    assert found.videos_per_hour == pytest.approx(4 * 3)
    assert found.busy_share == pytest.approx(2400 / (2 * 20 * 60 + 2 * 10 * 60))


def test_the_newer_account_of_a_job_keeps_what_only_the_older_one_knows() -> None:
    found = report(record(1, 10, cost=cost(0, 600)), record(1, 10.01))
    assert found.busy_share == pytest.approx(600 / (2 * 600.6), rel=1e-2)
    # But not across two ends of it.
    assert report(record(1, 10, cost=cost(0, 600)), record(1, 20, "failed")).busy_share is None


def test_nothing_happened() -> None:
    found = report(ending="It ended because the queue was empty.")
    assert (found.videos_per_hour, found.busy_share, found.jobs) == (None, None, ())
    assert found.lines() == [
        f"0 finished, 0 failed, 0 stopped, 0 canceled, {found.period}.",
        "It ended because the queue was empty.",
        "Left: 3 queued, 0 started, 0 scheduled, 0 deferred.",
    ]


def test_failures_are_told_by_reason_the_most_frequent_first() -> None:
    failures = [record(number, number, "failed", error="The frames are black.") for number in range(2, 9)]
    lines = report(record(1, 1, "failed", error="No memory."), *failures).lines()
    assert lines[-1] == f"Failed, 1 x: No memory. photo 1 ({1:020x})"
    assert lines[-2].startswith("Failed, 7 x: The frames are black. photo 2 (")
    assert lines[-2].endswith("photo 6 (00000000000000000006) and 2 more")
