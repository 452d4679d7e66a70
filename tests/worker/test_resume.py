"""Half-done videos through real groups: stopped or killed in the middle, they go on where they were, bit by bit."""

import shutil
import signal
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow


def nothing_is_left(site) -> None:
    assert list((site.settings.home / "checkpoints").iterdir()) == []
    assert list((Path(site.settings.storage) / "tmp").iterdir()) == []


def submit_twice(site, **options) -> tuple[str, str]:
    """Submit the same video twice: one to be disturbed, one to compare it with."""
    return site.submit(formats=("png",), seed=5, **options), site.submit(formats=("png",), seed=5, **options)


@pytest.mark.parametrize(
    ("kind", "ranks", "ranks_then"),
    [("simulated", 2, 1), pytest.param("tiny", 3, 2, marks=pytest.mark.long)],
)
def test_a_group_that_was_stopped_goes_on_where_it_was(
    request: pytest.FixtureRequest, site, until, kind: str, ranks: int, ranks_then: int
) -> None:
    if kind == "tiny":
        model, steps, size = str(request.getfixturevalue("tiny_model")), 20, (128, 64)
    else:
        model, steps, size = "simulated:step_ms=50", 100, (64, 64)
    job_id, same = submit_twice(site, frames=2, steps=steps, width=size[0], height=size[1])
    group = site.start(ranks, model=model)
    until(lambda: site.view(job_id).step >= 3, lambda: group.text)
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0
    queued = [job_id] if site.view(same).status == "finished" else [job_id, same]  # another rank may have been faster
    assert site.queued() == queued
    kept = [int(path.stem) for path in (site.settings.home / "checkpoints" / job_id).glob("*.safetensors")]
    assert max(kept) >= 1

    # With another number of ranks: what is left is spread over those that are there.
    assert site.start(ranks_then, "--burst", model=model, wait=False).end() == 0
    np.testing.assert_array_equal(site.frames(job_id), site.frames(same))
    (sidecar,) = site.sidecars(job_id)
    (resumption,) = sidecar["resumed"]
    assert resumption["from_step"] == max(kept)
    assert resumption["steps_done_again"] == 0
    assert sum(stage["steps"] for stage in sidecar["stages"]) == steps
    nothing_is_left(site)


@pytest.mark.long
def test_a_video_is_not_continued_with_other_weights_of_the_same_name(site, until, tiny_model: Path) -> None:
    model = site.folder / "model"
    shutil.copytree(tiny_model, model)
    job_id, same = submit_twice(site, frames=2, steps=20, width=128, height=64)
    group = site.start(1, model=str(model))
    until(lambda: site.view(job_id).step >= 3, lambda: group.text)
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0
    assert site.queued() == [job_id, same]

    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    other = {name: 1.1 * tensor for name, tensor in load_file(weights).items()}
    save_file(other, weights, metadata={"format": "pt"})
    group = site.start(1, "--burst", model=str(model), wait=False)
    assert group.end() == 0
    assert "cannot be used: it was made with format " in group.text
    np.testing.assert_array_equal(site.frames(job_id), site.frames(same))
    nothing_is_left(site)


@pytest.mark.long
def test_all_ranks_killed_cost_the_steps_since_the_last_hand_over(site, until) -> None:
    model = "simulated:step_ms=100"
    # More than ranks, so that the plan divides videos between them.
    jobs = [site.submit(steps=30, frames=2) for _ in range(6)]
    group = site.start(3, model=model)

    def handed_over() -> dict[str, int]:
        """Return the furthest checkpoint of each video that was handed over and is not yet denoised."""
        kept: dict[str, int] = {}
        for path in (site.settings.home / "checkpoints").glob("*/*.safetensors"):
            kept[path.parent.name] = max(int(path.stem), kept.get(path.parent.name, 0))
        return {job_id: step for job_id, step in kept.items() if step < 30}

    until(lambda: any(site.view(job_id).step > step + 1 for job_id, step in handed_over().items()), lambda: group.text)
    group.kill_all()
    kept = handed_over()

    second = site.start(3, "--burst", model=model, wait=False)
    assert second.end() == 0, second.text
    # The simulated model fails a video of which a step was done twice in a row, or left out.
    assert {site.view(job_id).status for job_id in jobs} == {"finished"}
    for job_id, step in kept.items():
        (sidecar,) = site.sidecars(job_id)
        (resumption,) = sidecar["resumed"]
        assert resumption["from_step"] == step
        assert resumption["steps_done_again"] < 30 - step
    nothing_is_left(site)


@pytest.mark.long
def test_a_video_that_was_denoised_and_not_decoded_is_only_decoded(site, until) -> None:
    model = "simulated:step_ms=20,decode_ms=3000"
    job_id = site.submit(steps=8, frames=2)
    group = site.start(2, model=model)
    until(lambda: site.view(job_id).step == 8, lambda: group.text)
    until(lambda: (site.settings.home / "checkpoints" / job_id / "8.safetensors").exists())
    group.kill_all()
    assert site.start(2, "--burst", model=model, wait=False).end() == 0
    (sidecar,) = site.sidecars(job_id)
    assert sidecar["resumed"] == [{"from_step": 8, "steps_done_again": 0}]
    nothing_is_left(site)


@pytest.mark.long
def test_a_video_whose_end_was_not_acknowledged_is_not_rendered_again(site) -> None:
    job_id = site.submit(seed=9)
    assert site.start(1, "--burst", wait=False).end() == 0
    before = {path: path.stat().st_mtime_ns for path in (Path(site.settings.storage) / "outputs").iterdir()}
    result = site.view(job_id).outputs

    # As a kill between the rename and the acknowledgement leaves it.
    site.connection.hset(f"rq:job:{job_id}", "status", "queued")
    site.connection.zrem("rq:finished:svdq-default", job_id)
    site.connection.delete(f"rq:results:{job_id}")
    site.connection.lpush("rq:queue:svdq-default", job_id)

    group = site.start(1, "--burst", wait=False)
    assert group.end() == 0
    assert site.view(job_id).status == "finished"
    assert site.view(job_id).outputs == result
    assert f"The files of job {job_id} exist already" in group.text
    assert {path: path.stat().st_mtime_ns for path in (Path(site.settings.storage) / "outputs").iterdir()} == before


@pytest.mark.long
def test_until_ends_the_group_and_keeps_checkpoints(site, until) -> None:
    job_id = site.submit(steps=1000)
    moment = datetime.now() + timedelta(seconds=20)  # rank 0 is up by then
    options = ("--until", moment.isoformat(timespec="seconds"), "--report", str(site.folder / "night.json"))
    group = site.start(1, *options, model="simulated:step_ms=50", wait=False)
    assert group.end() == 0
    assert "It ended at the time given, " in group.text
    assert site.queued() == [job_id]
    assert "went back to the queue" in group.text
    assert list((site.settings.home / "checkpoints" / job_id).glob("*.safetensors"))


def test_a_time_that_is_none_is_refused_before_anything_starts(site) -> None:
    answer = site.run("svdq", "worker", "--ranks", 2, "--until", "late")
    assert answer.returncode == 2
    assert "--until 'late' is not a time" in answer.stderr
