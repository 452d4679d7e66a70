"""Real groups with LTX-2: diffusers' frames for any number of ranks, in rounds, with sound, and after kill -9."""

import json
import os
import signal
from pathlib import Path

import av
import numpy as np
import pytest

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.ltx.family import FAMILY, LtxParameters
from svdq.pipeline.models.names.model_names import resolve
from svdq.producer.job import sound_key
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

VIDEO = {"family": "ltx", "prompt": "Ein Hund bellt.", "frames": 9, "width": 64, "height": 64, "seed": 5}
VIDEOS = [{}, {"stages": 1, "guidance_scale": 3.0}, {"frames": 17, "loop": True, "width": 128}]


def submit(site, **options) -> str:
    return site.submit(**({"steps": None, "formats": ("png",)} | VIDEO | options))


@pytest.fixture(scope="module")
def reference(tiny_ltx: Path):
    """Render a submitted video with diffusers, with the defaults of the model; a loop is written without its end."""

    def render(photo: Path, facts: Facts | None = None, **options) -> np.ndarray:
        facts = facts or FAMILY.read_facts(tiny_ltx, "tiny")
        values = FAMILY.complete(LtxParameters.model_validate(VIDEO | options), facts)
        prepared = prepare_photo(photo.read_bytes(), values.width, values.height)
        frames = diffusers_frames(tiny_ltx, prepared, values, facts=facts)
        return frames[:-1] if values.loop else frames

    return render


@pytest.mark.long
def test_in_rounds_frames_are_those_of_diffusers(site, tiny_ltx: Path, reference) -> None:
    jobs = [submit(site, **video) for video in VIDEOS]
    options = ("--experts", "rounds", "--host-memory", "0")
    group = site.start(1, "--burst", *options, model=str(tiny_ltx), wait=False)
    assert group.end() == 0, group.text
    for job_id, video in zip(jobs, VIDEOS, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, **video))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_are_killed_cost_no_bit_of_ancestral_steps(
    site, tiny_ltx: Path, reference, until, tmp_path: Path, ranks: int
) -> None:
    """Their noise is a part of the state from the encode on."""
    scheduler = 'class = "LTXEulerAncestralRFScheduler"\nstage_2_sigmas = [0.85, 0.725, 0.4219]'
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_ltx}"\n[scheduler]\n{scheduler}\n')
    facts = resolve(str(tmp_path / "mine.toml")).facts
    jobs = [submit(site, seed=seed, width=256, height=256, frames=25) for seed in range(2)]
    group = site.start(ranks, model=str(tmp_path / "mine.toml"))
    until(lambda: any(site.view(each).step >= 4 for each in jobs), lambda: group.text)
    os.kill(group.ranks()[-1].pid, signal.SIGKILL)
    site.wait(jobs)
    for seed, job_id in enumerate(jobs):
        expected = reference(site.photo, facts, seed=seed, width=256, height=256, frames=25)
        np.testing.assert_array_equal(site.frames(job_id), expected)


def tracks(path: str) -> dict[str, float]:
    """The length of each track of a video in seconds, by its codec."""
    with av.open(path) as container:
        return {each.codec_context.name: float(each.duration * each.time_base) for each in container.streams}


def pictures(path: str) -> np.ndarray:
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_frames_are_those_of_diffusers_and_videos_and_chains_have_one_track_of_sound_as_long_as_they_are(
    site, tiny_ltx: Path, reference
) -> None:
    jobs = [submit(site, **video) for video in VIDEOS]
    plain, silent, back, looped = (
        submit(site, frames=17, **{"formats": ("mp4", "gif"), **each})
        for each in (
            {"formats": ("wav", "mp4")},
            {"sound": False},
            {"boomerang": True},
            {"loop": True, "interpolate": 48},
        )
    )
    shape = ["--family", "ltx", "--frames", "17", "--size", "64x64", "--seed", "3", "--json"]
    done = site.run("svdq", "submit", site.photo, *shape, "--prompt", "A", "--then", "B", "--then", "C")
    assert done.returncode == 0, done.stderr
    links = [json.loads(line)["id"] for line in done.stdout.splitlines()]
    group = site.start(3, "--burst", model=str(tiny_ltx), wait=False)
    assert group.end() == 0, group.text
    for job_id, video in zip(jobs, VIDEOS, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, **video))
    files = {job_id: site.view(job_id).outputs for job_id in (plain, silent, back, looped, *links)}
    assert tracks(files[plain][0]) == pytest.approx({"h264": 17 / 24, "aac": 17 / 24}, abs=0.025)
    assert tracks(files[looped][0]) == pytest.approx({"h264": 16 / 24, "aac": 16 / 24}, abs=0.025)
    sound = Sound.parse(Path(files[plain][1]).read_bytes())
    assert (sound.rate, sound.pcm.shape) == (48000, (17 * 2000, 2))
    assert sound.pcm.any()
    for job_id in (silent, back):
        assert list(tracks(files[job_id][0])) == ["h264"]
    np.testing.assert_array_equal(pictures(files[plain][0]), pictures(files[silent][0]))
    for number, job_id in enumerate(links, start=1):
        num_frames = 16 * number + 1
        assert len(pictures(files[job_id][0])) == num_frames
        assert tracks(files[job_id][0]) == pytest.approx({"h264": num_frames / 24, "aac": num_frames / 24}, abs=0.025)
    storage = Path(site.settings.storage)
    one, two = (Sound.parse((storage / sound_key(job_id)).read_bytes()).pcm for job_id in links[:2])
    assert (len(one), len(two)) == (17 * 2000, 33 * 2000)
    np.testing.assert_array_equal(two[: len(one)], one)
