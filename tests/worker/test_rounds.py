"""A worker of one rank in rounds: resident bits, few loads, resumed after kill -9, handed back on Ctrl-C."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from svdq.producer.status.ranks import read_groups
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

VIDEO = {"family": "wan", "prompt": "Ein Hund läuft.", "frames": 5, "width": 64, "height": 64}
SLOW = "simulated:step_ms=100,segments=1+1,load_ms=10"


def loads(text: str) -> list[str]:
    return re.findall(r"Loaded the (.+?) in ", text)


def test_a_rank_in_rounds_loads_few_times_and_makes_diffusers_frames(site, tiny_wan: Path) -> None:
    videos = [VIDEO | {"seed": seed, "steps": 4 + seed % 2, "prompt": f"Photo {seed % 3}."} for seed in range(4)]
    jobs = [site.submit(formats=("png",), **video) for video in videos]
    group = site.start(1, "--burst", "--memory-limit", "300MB", model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    assert "this rank holds one expert at a time, in rounds over many videos" in group.text
    assert loads(group.text)[:5] == ["text encoder", "encoders", "transformer", "transformer_2", "decoder"]
    assert loads(group.text).count("transformer") == loads(group.text).count("transformer_2") <= 2, group.text
    facts, photo = FAMILY.read_facts(tiny_wan, "tiny"), prepare_photo(site.photo.read_bytes(), 64, 64)
    for job_id, video in list(zip(jobs, videos, strict=True))[::3]:
        values = FAMILY.complete(WanParameters.model_validate(video), facts)
        np.testing.assert_array_equal(site.frames(job_id), diffusers_frames(tiny_wan, photo, values))


def test_several_ranks_are_told_to_be_groups(site) -> None:
    group = site.start(2, "--experts", "rounds", model=SLOW, wait=False)
    assert group.end() == 2
    assert "svdq worker --experts rounds --groups 2 --ranks 1" in group.text
    assert "Starting" not in group.text  # nor has it waited for torch


@pytest.mark.long
def test_sigterm_waits_for_no_load(site, until) -> None:
    job_id = site.submit(steps=2)
    group = site.start(1, "--experts", "rounds", model="simulated:step_ms=1,segments=1+1,load_ms=600000")
    until(lambda: any(rank.activity == "loading" for each in read_groups(site.connection) for rank in each.ranks))
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert site.view(job_id).status == "queued"


def test_in_rounds_a_cancel_is_prompt_a_killed_video_continues_and_ctrl_c_hands_back_all(site, until) -> None:
    canceled, *jobs = (site.submit(steps=20, seed=seed) for seed in range(3))
    group = site.start(1, "--experts", "rounds", model=SLOW)
    until(lambda: site.view(canceled).step >= 1, lambda: group.text)
    assert site.run("svdq", "cancel", canceled).returncode == 0
    assert site.wait([canceled])[0].status == "stopped"
    until(lambda: site.view(jobs[-1]).step >= 10, lambda: group.text)
    os.kill(group.ranks()[0].pid, signal.SIGKILL)
    assert [view.status for view in site.wait(jobs)] == ["finished"] * 2
    assert site.sidecars(jobs[-1])[0]["resumed"][0]["from_step"] >= 10

    jobs = [site.submit(steps=20, seed=seed) for seed in range(3)]
    until(lambda: any(site.view(job_id).step >= 2 for job_id in jobs), lambda: group.text)
    group.send_signal(signal.SIGINT)
    assert group.end() == 0, group.text
    assert "all others continue from there later" in group.text
    assert {site.view(job_id).status for job_id in jobs} == {"queued"}


@pytest.mark.long
def test_a_component_that_is_gone_ends_the_worker_and_no_job(site, tiny_wan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(tiny_wan, folder)
    group = site.start(1, "--experts", "rounds", model=str(folder))
    shutil.rmtree(folder / "transformer_2")
    job_id = site.submit(steps=4, **VIDEO)
    assert group.end() == 2
    assert "The transformer_2 of the model" in group.text
    assert site.view(job_id).status == "queued"
