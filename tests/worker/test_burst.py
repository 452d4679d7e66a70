"""`svdq worker --burst` as cron starts it: what it prints at its end, and that two of them do not double up."""

import json
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from svdq.producer.pauses import Pause
from svdq.producer.queue import End
from svdq.producer.results.run_report import RunRecord, summarize
from svdq.worker.launcher.launcher import Ending
from svdq.worker.launcher.notifications import exit_code, why_ended

SIMULATED = "simulated:step_ms=100"


STARTED_AT = datetime(2027, 1, 30, 22, 0).astimezone()
MORNING = datetime(2027, 1, 31, 6, 0).timestamp()
NEXT_WEEK = datetime(2027, 2, 6, 6, 0).timestamp()


def ending(ended_by: str = "", code: int = 0, until_s: float | None = None) -> Ending:
    return Ending(code=code, ended_by=ended_by, burst=True, until_s=until_s)


@pytest.mark.parametrize(
    ("how", "left", "pauses", "words"),
    [
        (ending(), {}, [], "because the queue was empty"),
        (ending(until_s=MORNING), {"scheduled": 3}, [], "because the queue was empty"),
        (ending("until", until_s=NEXT_WEEK), {"queued": 3}, [], "at the time given, 2027-02-06 06:00."),
        (ending(until_s=MORNING), {"queued": 3}, [Pause(text="Paused: by me.")], "no jobs are taken. Paused: by me."),
        (ending("until", until_s=MORNING), {"queued": 3}, [], "at the time given, 06:00."),
        (ending("signal", until_s=MORNING), {"queued": 3}, [], "stopped by a signal"),
        (ending(code=1), {}, [], "failed with exit code 1"),
        (replace(ending(until_s=MORNING), burst=False), {}, [], "at the time given, 06:00."),
    ],
)
def test_why_a_run_ended(how: Ending, left: dict, pauses: list[Pause], words: str) -> None:
    assert words in why_ended(how, STARTED_AT, left=left, pauses=pauses)


@pytest.mark.parametrize(
    ("how", "ends", "code"),
    [
        (ending(), ["failed", "failed", "canceled"], 1),
        (ending(), ["failed", "finished"], 0),
        (ending(), [], 0),
        (ending(code=3), ["failed"], 3),
        (replace(ending(until_s=MORNING), burst=False), ["failed"], 0),
    ],
)
def test_a_burst_in_which_all_videos_failed_ends_with_1(how: Ending, ends: list[End], code: int) -> None:
    jobs = [RunRecord(id=str(number), name="x", status=end, ended_at=STARTED_AT) for number, end in enumerate(ends)]
    assert exit_code(how, summarize(jobs, {}, since=STARTED_AT, until=STARTED_AT)) == code


def test_a_burst_that_found_the_queue_paused_ends_with_1() -> None:
    why = why_ended(
        ending(), STARTED_AT, left={"queued": 3}, pauses=[Pause(text="PAUSED bursts: 3 jobs failed alike.")]
    )
    assert exit_code(ending(), summarize([], {"queued": 3}, since=STARTED_AT, until=STARTED_AT, ending=why)) == 1


@pytest.mark.long
def test_a_burst_reports_how_its_jobs_ended(site, until) -> None:
    jobs = [site.submit(steps=4, seed=seed) for seed in range(3)]
    # A photo that was damaged after it was submitted.
    bad = site.folder / "bad.jpg"
    bad.write_bytes(site.photo.read_bytes() + b"x")
    jobs.append(site.submit(photo=bad))
    stored = Path(site.settings.storage) / site.view(jobs[-1]).parameters["image"]
    stored.write_bytes(stored.read_bytes()[:300])
    jobs += [site.submit(steps=1000), site.submit(steps=4)]
    report, stopped = site.folder / "night.json", site.folder / "stopped.json"

    first = site.start(2, "--burst", "--report", str(report), model=SIMULATED)
    until(lambda: site.states(jobs[:4]) == ["finished"] * 3 + ["failed"])
    until(lambda: site.states(jobs[4:5]) == ["started"])
    assert site.run("svdq", "cancel", jobs[4]).returncode == 0
    assert first.end() == 0

    assert site.states(jobs) == ["finished"] * 3 + ["failed", "stopped", "finished"]
    told = json.loads(report.read_text())
    assert (told["finished"], told["failed"], told["stopped"], sum(told["left"].values())) == (4, 1, 1, 0)
    assert told["ending"] == "It ended because the queue was empty."
    assert {job["id"]: job["status"] for job in told["jobs"]} == dict(zip(jobs, site.states(jobs), strict=True))
    assert told["videos_per_hour"] > 0
    lines = first.text.splitlines()
    assert any(line.startswith("4 finished, 1 failed, 1 stopped, 0 canceled, from 20") for line in lines)
    assert any(line.startswith("Failed, 1 x: The photo inputs/") for line in lines)

    # Stopped in the middle: what is left is told, and the same numbers are found later.
    jobs = [site.submit(steps=300) for _ in range(3)]
    group = site.start(2, "--burst", "--report", str(stopped), model=SIMULATED)
    until(lambda: "started" in site.states(jobs))
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0
    assert "0 finished, 0 failed, 0 stopped, 0 canceled, from 20" in group.text
    assert "It was stopped by a signal." in group.text
    assert "Left: 3 queued, 0 started, 0 scheduled, 0 deferred." in group.text
    assert json.loads(stopped.read_text())["ending"] == "It was stopped by a signal."
    later = json.loads(site.run("svdq", "report", "--since", "1h", "--json").stdout)
    assert {**later["left"], "finished": later["finished"]} == {
        "queued": 3,
        "started": 0,
        "scheduled": 0,
        "deferred": 0,
        "finished": 4,
    }
    assert later["videos_per_hour"] > 0


def test_a_report_that_cannot_be_written_is_refused_before_the_run(site) -> None:
    for name in ("night.txt", "nowhere/night.json"):
        done = site.run("svdq", "worker", "--ranks", 1, "--device", "cpu", "--burst", "--report", name)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
