"""How times, conditions and expectations read."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from svdq.cli.formatting import clock, condition_reason, describe, expected
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import Condition
from tests.conftest import Cli

NOW = datetime(2027, 1, 30, 22, 15).astimezone()


def test_a_job_whose_time_has_passed_waits() -> None:
    due = datetime(2020, 1, 1, tzinfo=UTC)
    assert "  waiting since 20" in describe(JobView(id="1f0c", status="scheduled", scheduled_at=due))
    later = due.replace(year=2099)
    assert "  scheduled for 2099-" in describe(JobView(id="1f0c", status="scheduled", scheduled_at=later))


def test_times_of_another_day_have_their_date() -> None:
    assert clock(NOW.timestamp(), NOW) == "22:15"
    assert clock((NOW - timedelta(days=1)).timestamp(), NOW) == "2027-01-29 22:15"


def test_quiet_prints_warnings_errors_and_json_only(svdq: Cli, photo: Path, tmp_path: Path) -> None:
    quiet = svdq("submit", photo, "--size", "320x640", "--quiet")
    assert (quiet.returncode, quiet.stdout) == (0, "")
    assert "--size auto or --fit pad keeps more" in quiet.stderr
    assert json.loads(svdq("submit", photo, "-q", "--json").stdout)["photo"] == str(photo)
    assert svdq("submit", tmp_path / "none.jpg", "-q").returncode == 2


def test_prompts_are_shortened_in_lists() -> None:
    job = JobView(id="1f0c", status="queued", parameters={"name": "photo", "prompt": "A  wave\nbreaks."})
    assert describe(job) == '1f0c  photo  "A wave breaks."  queued'
    long = JobView(id="1f0c", status="queued", parameters={"name": "photo", "prompt": "x" * 100})
    assert describe(long) == f'1f0c  photo  "{"x" * 59}…"  queued'
    assert "x" * 100 in describe(long, whole_prompt=True)
    from_folder = JobView(id="1f0c", status="queued", source="day 1/IMG_0001.jpg", parameters={"name": "IMG_0001"})
    assert describe(from_folder, whole_prompt=True) == "1f0c  IMG_0001  queued  (photo: day 1/IMG_0001.jpg)"
    for prompt in (None, 5, ["x"], ""):
        assert describe(JobView(id="1f0c", status="queued", parameters={"prompt": prompt})) == "1f0c  ?  queued"


def test_estimates_and_conditions_of_a_job() -> None:
    condition = Condition(effect="Videos wait", reason="No space left.", since=datetime.now().timestamp(), attempts=1)
    assert condition_reason(condition).startswith("No space left. (since ")
    assert condition_reason(condition).endswith(", tried once)")
    assert expected(Estimate(condition=condition, eta_s=5.0)) == f", waiting for storage: {condition_reason(condition)}"
    assert expected(Estimate(num_ahead=0)) == ", next"
    assert expected(Estimate(num_ahead=3, eta_s=150.0)) == ", 3 ahead of it, done in about 2 min"
    assert expected(Estimate()) == ""
