"""A worker of one rank in rounds: resident bits, few loads, resumed after kill -9, handed back on Ctrl-C."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from gpu_checks.tiny import write_tiny_wan

from svdq.pipeline.planning.rounds import FIRST_VIDEOS
from svdq.producer.status.ranks import read_groups

pytestmark = pytest.mark.slow

VIDEO = {"family": "wan", "prompt": "Ein Hund läuft.", "frames": 5, "width": 64, "height": 64}
SLOW = "simulated:step_ms=100,segments=1+1,load_ms=10"


def submit(house, seed: int, **options) -> str:
    return house.submit(formats=("png",), **(VIDEO | {"seed": seed, "steps": 4} | options))


def loads(text: str) -> list[str]:
    return re.findall(r"Loaded the (.+?) in ", text)


def test_frames_are_those_of_a_resident_model_and_each_expert_is_loaded_twice_at_most(house, tiny_wan: Path) -> None:
    jobs = [submit(house, seed, steps=4 + seed % 2, prompt=f"Photo {seed % 3}.") for seed in range(12)]
    group = house.start(1, "--burst", "--experts", "rounds", "--host-memory", "0", model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    found = loads(group.text)
    assert 1 <= found.count("transformer") == found.count("transformer_2") <= 2, group.text
    frames = [house.frames(job_id) for job_id in jobs]
    again = [submit(house, seed, steps=4 + seed % 2, prompt=f"Photo {seed % 3}.") for seed in range(12)]
    assert house.start(1, "--burst", "--experts", "resident", model=str(tiny_wan), wait=False).end() == 0
    for job_id, expected in zip(again, frames, strict=True):
        np.testing.assert_array_equal(house.frames(job_id), expected)


def test_a_rank_alone_without_room_for_both_experts_works_in_rounds(house, tiny_wan: Path) -> None:
    job_id = submit(house, 1)
    group = house.start(1, "--burst", "--memory-limit", "300MB", model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    assert "this rank holds one expert at a time, in rounds over many videos" in group.text
    assert loads(group.text) == ["text encoder", "encoders", "transformer", "transformer_2", "decoder"]
    assert house.view(job_id).status == "finished"


def test_a_model_with_one_transformer_takes_turns_with_its_text_encoder(house, tmp_path: Path) -> None:
    write_tiny_wan(tmp_path / "ti2v", "ti2v-5b")
    shape = {"prompt": "Rain.", "steps": 3}
    jobs = [submit(house, seed, **shape) for seed in range(3)]
    model = str(tmp_path / "ti2v")
    group = house.start(1, "--burst", "--experts", "rounds", "--host-memory", "0", model=model, wait=False)
    assert group.end() == 0, group.text
    assert loads(group.text).count("transformer") <= 2
    frames = [house.frames(job_id) for job_id in jobs]
    again = [submit(house, seed, **shape) for seed in range(3)]
    assert house.start(1, "--burst", model=model, wait=False).end() == 0
    for job_id, expected in zip(again, frames, strict=True):
        np.testing.assert_array_equal(house.frames(job_id), expected)


def test_several_ranks_are_told_to_be_groups(house) -> None:
    group = house.start(2, "--experts", "rounds", model=SLOW, wait=False)
    assert group.end() == 2
    assert "svdq worker --experts rounds --groups 2 --ranks 1" in group.text


def test_ctrl_c_finishes_the_steps_of_one_video_and_hands_back_all(house, until) -> None:
    jobs = [house.submit(steps=20, seed=seed) for seed in range(3)]
    group = house.start(1, "--experts", "rounds", model=SLOW)
    until(lambda: any(house.view(job_id).step >= 2 for job_id in jobs), lambda: group.text)
    group.send_signal(signal.SIGINT)
    assert group.end() == 0, group.text
    assert "all others continue from there later" in group.text
    assert {house.view(job_id).status for job_id in jobs} == {"queued"}
    assert house.start(1, "--burst", "--experts", "rounds", model=SLOW, wait=False).end() == 0
    assert {house.view(job_id).status for job_id in jobs} == {"finished"}


def test_a_canceled_job_does_not_wait_for_the_end_of_its_round(house, until) -> None:
    first, second = (house.submit(steps=40, seed=seed) for seed in range(2))
    group = house.start(1, "--experts", "rounds", model=SLOW)
    until(lambda: house.view(first).step >= 1, lambda: group.text)
    assert house.run("svdq", "cancel", second).returncode == 0
    house.wait([second])
    assert house.view(second).status == "stopped"
    house.wait([first])
    assert house.view(first).status == "finished"


@pytest.mark.long
def test_no_video_enters_a_round_that_would_end_after_the_time_given(house) -> None:
    """A round of 30 videos would take a minute, and none of them would be done in time."""
    jobs = [house.submit(steps=20, seed=seed) for seed in range(60)]
    group = house.start(1, "--experts", "rounds", "--until", "+40s", model=SLOW, wait=False)
    assert group.end() == 0, group.text
    states = house.states(jobs)
    assert "queued" in states, "the time was too long for this test"
    begun = {job_id for job_id in jobs if house.view(job_id).started_at is not None}
    finished = [job_id for job_id, state in zip(jobs, states, strict=True) if state == "finished"]
    assert len(finished) > FIRST_VIDEOS
    assert len(begun - {*finished}) <= len(finished) / 4, group.text  # by estimates on a busy machine


def test_sigterm_waits_for_no_load(house, until) -> None:
    job_id = house.submit(steps=2)
    group = house.start(1, "--experts", "rounds", model="simulated:step_ms=1,segments=1+1,load_ms=600000")
    until(lambda: any(rank.activity == "loading" for each in read_groups(house.connection) for rank in each.ranks))
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert house.view(job_id).status == "queued"


def test_after_a_kill_the_furthest_continue_from_their_checkpoints(house, until) -> None:
    jobs = [house.submit(steps=20, seed=seed) for seed in range(2)]
    group = house.start(1, "--experts", "rounds", model=SLOW)
    until(lambda: min(house.view(job_id).step for job_id in jobs) >= 10, lambda: group.text)
    os.kill(group.ranks()[0].pid, signal.SIGKILL)
    house.wait(jobs)
    sidecars = [house.sidecars(job_id)[0] for job_id in jobs]
    assert all(sidecar["resumed"][0]["from_step"] >= 10 for sidecar in sidecars)


def test_a_component_that_is_gone_ends_the_worker_and_no_job(house, tiny_wan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(tiny_wan, folder)
    group = house.start(1, "--experts", "rounds", model=str(folder))
    shutil.rmtree(folder / "transformer_2")
    job_id = submit(house, 1)
    assert group.end() == 2
    assert "The transformer_2 of the model" in group.text
    assert house.view(job_id).status == "queued"
    shutil.copytree(tiny_wan / "transformer_2", folder / "transformer_2")
    assert house.start(1, "--burst", "--experts", "rounds", model=str(folder), wait=False).end() == 0
    assert house.sidecars(job_id)[0]["resumed"][0]["from_step"] == 2
