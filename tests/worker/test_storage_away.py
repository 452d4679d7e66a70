"""A storage that refuses while a real group has videos: seen wherever a user looks, and gone when it is over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.producer import keys
from svdq.producer.status.ranks import read_groups

pytestmark = pytest.mark.long

SIMULATED = "simulated:step_ms=20"


def shown(site, *arguments: object) -> str:
    answer = site.run("svdq", *arguments)
    assert answer.returncode == 0, answer
    return answer.stdout


def unwrapped(text: str) -> str:
    """Join the lines into which a long sentence was wrapped."""
    return " ".join(text.split())


def test_videos_that_cannot_be_written_wait_in_sight(site, until) -> None:
    outputs = Path(site.settings.storage) / "outputs"
    group = site.start(2, model=SIMULATED)
    outputs.rmdir()  # the group made it, to test whether it can write
    outputs.write_text("a file is in the way")
    first, second = site.submit(), site.submit()

    def conditions() -> list[dict[str, object]]:
        found = json.loads(shown(site, "status", "--json"))["conditions"]
        return found if found and first in found[0]["job_ids"] and second in found[0]["job_ids"] else []

    (condition,) = until(conditions, lambda: group.text)
    assert (condition["rank"], condition["effect"]) == (1, "Videos wait to be written")
    (status,) = read_groups(site.connection)
    assert status.ranks[1].activity == "waiting"
    assert 0 < site.connection.ttl(status.ranks[1].key) <= keys.RANK_TTL_S
    assert "rank 1: Videos wait to be written: The storage " in unwrapped(shown(site, "status"))
    for job_id in (first, second):
        line = shown(site, "status", job_id)
        assert f"{job_id}  photo  started, waiting for storage: The storage " in line
        assert "tried " in line
    assert json.loads(shown(site, "status", second, "--json"))["condition"]["reason"].startswith("The storage ")
    with subprocess.Popen(
        [sys.executable, "-m", "svdq.cli", "wait", second],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=site.environment(),
    ) as waiting:
        assert waiting.stderr is not None
        assert "Videos wait to be written: The storage " in waiting.stderr.readline()

        # What is canceled meanwhile is not waited for.
        shown(site, "cancel", first)
        assert site.wait([first])[0].status == "stopped"
        assert site.view(second).status == "started"

        outputs.unlink()
        assert site.wait([second])[0].status == "finished"
        assert waiting.wait(60) == 0
    until(lambda: json.loads(shown(site, "status", "--json"))["conditions"] == [])
    assert "Videos wait to be written" not in unwrapped(shown(site, "status"))
    assert not list(outputs.glob(f"*{first}*"))
    logged = shown(site, "logs", second)
    assert f"Job {second} finished" in logged


def test_photos_that_cannot_be_read_hold_intake_in_sight(site, until) -> None:
    group = site.start(1, model=SIMULATED)
    held, after = site.submit(), site.submit()
    site.wait([held, after])
    inputs = Path(site.settings.storage) / "inputs"
    inputs.rename(inputs.with_name("away"))
    try:
        # The photo is stored again under the same name when it is submitted.
        held, after = (requeued(site, job_id) for job_id in (held, after))
        until(lambda: "waiting for storage" in shown(site, "status", held), lambda: group.text)
        assert "No video is begun: The storage " in unwrapped(shown(site, "status"))
        assert site.states([held, after]) == ["started", "queued"]
        shown(site, "cancel", held)
        assert site.wait([held])[0].status == "stopped"
        until(lambda: "waiting for storage" in shown(site, "status", after))
    finally:
        inputs.with_name("away").rename(inputs)
    assert site.wait([after])[0].status == "finished"
    until(lambda: "No video is begun" not in unwrapped(shown(site, "status")))
    assert 1 <= group.text.count("No video is begun") <= 3


def requeued(site, job_id: str) -> str:
    shown(site, "retry", job_id, "--force")
    return job_id
