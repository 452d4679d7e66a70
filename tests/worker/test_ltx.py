"""Real groups with LTX-2: diffusers' frames for any number of ranks, in rounds, with sound, and after kill -9."""

import json
import os
import signal
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.models.ltx.family import FAMILY, LtxParameters
from svdq.producer.job import sound_key
from tests.faults.arena import INJECTION
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

VIDEO = {"family": "ltx", "prompt": "Ein Hund bellt.", "frames": 9, "width": 64, "height": 64, "seed": 5}
VIDEOS = [{}, {"stages": 1, "guidance_scale": 3.0}, {"frames": 17, "loop": True, "width": 128}]


def submit(site, **options) -> str:
    return site.submit(**({"steps": None, "formats": ("png",)} | VIDEO | options))


@pytest.fixture(scope="module")
def reference(tiny_ltx: Path):
    """Render a submitted video with diffusers, with the defaults of the model; a loop is written without its end."""

    def render(photo: Path, **options) -> np.ndarray:
        values = FAMILY.complete(LtxParameters.model_validate(VIDEO | options), FAMILY.read_facts(tiny_ltx, "tiny"))
        frames = diffusers_frames(tiny_ltx, prepare_photo(photo.read_bytes(), values.width, values.height), values)
        return frames[:-1] if values.loop else frames

    return render


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, ()),
        pytest.param(1, (), marks=pytest.mark.long),
        pytest.param(3, (), marks=pytest.mark.long),
        pytest.param(7, (), marks=pytest.mark.long),
        pytest.param(1, ("--experts", "rounds", "--host-memory", "0"), marks=pytest.mark.long),
    ],
)
def test_frames_are_those_of_diffusers(site, tiny_ltx: Path, reference, num_ranks, options) -> None:
    jobs = [submit(site, **video) for video in VIDEOS]
    group = site.start(num_ranks, "--burst", *options, model=str(tiny_ltx), wait=False)
    assert group.end() == 0, group.text
    for job_id, video in zip(jobs, VIDEOS, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, **video))


@pytest.mark.long
@pytest.mark.parametrize("step", [0, 4, 9])
def test_a_rank_that_is_killed_costs_no_bit(site, tiny_ltx: Path, reference, until, step) -> None:
    jobs = [submit(site, seed=seed, width=256, height=256, frames=25) for seed in range(2)]
    group = site.start(2, model=str(tiny_ltx))
    until(lambda: site.view(jobs[1]).step >= step and site.view(jobs[1]).status == "started", lambda: group.text)
    os.kill(group.ranks()[1].pid, signal.SIGKILL)
    site.wait(jobs)
    for seed, job_id in enumerate(jobs):
        expected = reference(site.photo, seed=seed, width=256, height=256, frames=25)
        np.testing.assert_array_equal(site.frames(job_id), expected)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["encode", "decode"])
def test_a_rank_that_dies_in_an_encode_or_a_decode_costs_no_bit(
    site, tiny_ltx: Path, reference, tmp_path, phase
) -> None:
    (tmp_path / "kill").touch()
    faults = {"PYTHONPATH": str(INJECTION), "FAULTS_AT": f"ltx-{phase}", "FAULTS_FOLDER": str(tmp_path)}
    jobs = [submit(site, seed=seed) for seed in range(2)]
    group = site.start(2, "--burst", model=str(tiny_ltx), wait=False, **faults)
    assert group.end() == 0, group.text
    assert (tmp_path / "done-kill").exists()
    for seed, job_id in enumerate(jobs):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, seed=seed))


@pytest.mark.long
def test_weights_as_their_files_store_them_make_the_same_video(site, tiny_ltx: Path, tmp_path: Path) -> None:
    lines = []
    for component in ("transformer", "connectors"):
        tensors = load_file(next((tiny_ltx / component).glob("*.safetensors")))
        for name, weight in list(tensors.items()):
            if name.endswith(".weight") and weight.ndim == 2 and "transformer_blocks" in name:
                scale = weight.abs().max() / 448
                tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
                tensors[name.replace(".weight", ".scale_weight")] = scale
        save_file(tensors, tmp_path / f"{component}.safetensors")
        lines.append(f'{component} = "{component}.safetensors"')
    model = tmp_path / "fp8.toml"
    model.write_text("\n".join([f'base = "{tiny_ltx}"', "[weights]", *lines]))
    made, stored = [], []
    for frames, weights in ((made, "made"), (stored, "stored")):
        job_id = submit(site)
        group = site.start(2, "--burst", "--weights", weights, model=str(model), wait=False)
        assert group.end() == 0, group.text
        frames.append(site.frames(job_id))
        assert site.sidecars(job_id)[0]["model"]["name"] == "fp8"
    np.testing.assert_array_equal(made, stored)


def tracks(path: str) -> dict[str, float]:
    """The length of each track of a video in seconds, by its codec."""
    with av.open(path) as container:
        return {each.codec_context.name: float(each.duration * each.time_base) for each in container.streams}


def pictures(path: str) -> np.ndarray:
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_video_and_a_chain_have_one_track_of_sound_as_long_as_they_are(site, tiny_ltx: Path) -> None:
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
    group = site.start(2, "--burst", model=str(tiny_ltx), wait=False)
    assert group.end() == 0, group.text
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
