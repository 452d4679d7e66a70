"""The fault harness in its short form, run as a person runs it; `python -m tests.faults` alone is the long one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARGUMENTS = ("--campaign", "short", "--jobs", "6", "--ranks", "2", "--seed", "7")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_nothing_is_lost_in_the_short_campaigns(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    answer = subprocess.run(
        [sys.executable, "-m", "tests.faults", *ARGUMENTS, "--report", str(report)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=540,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    campaigns = {outcome["campaign"]: outcome for outcome in json.loads(report.read_text())["campaigns"]}
    assert {*campaigns} == {"kill-rank", "mixed", "kill-all"}
    # A harness that injects nothing proves nothing.
    assert all(campaigns[name]["recoveries_s"] for name in ("kill-rank", "kill-all")), campaigns
    assert campaigns["mixed"]["num_starts"] >= 3, "the job that kills its rank has killed it twice"
