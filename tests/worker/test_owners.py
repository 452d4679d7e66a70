"""A worker takes the jobs of owners by turns."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_three_photos_do_not_wait_behind_twelve(site) -> None:
    ids = {}
    for owner, number in (("ana", 12), ("ben", 3)):
        for seed in range(number):
            done = site.run(
                "svdq",
                *("submit", site.photo, "--steps", 2, "--frames", 2, "--size", "64x64", "--format", "gif"),
                *("--seed", seed, "--name", f"{owner}-{seed}", "--output", "{owner}/", "--force", "--json"),
                SVDQ_OWNER=owner,
            )
            assert done.returncode == 0, done.stderr
    turns = ["ana-0", "ben-0", "ana-1", "ben-1", "ana-2", "ben-2", *(f"ana-{seed}" for seed in range(3, 12))]
    ids = site.queued()
    assert [site.view(job_id).name for job_id in ids] == turns
    site.start(1, model="simulated:step_ms=20")
    views = site.wait(ids)
    assert [view.status for view in views] == ["finished"] * 15
    # Of two videos that end at the same time, either may be written first.
    assert [view.name for view in sorted(views, key=lambda view: view.started_at)] == turns
    assert {f"outputs/{view.owner}/{view.name}" in view.outputs[0] for view in views} == {True}
    sidecars = [json.loads(Path(view.outputs[0]).with_suffix(".json").read_text()) for view in views]
    assert [sidecar["owner"] for sidecar in sidecars] == [view.owner for view in views]
