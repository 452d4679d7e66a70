"""Finished videos that are upscaled later: from their latents the same bits as at once, else from their mp4."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from svdq.pipeline.media.mp4 import read_mp4
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import write_video
from svdq.pipeline.models.video_model import ModelInfo
from svdq.producer.job import parse_job
from svdq.producer.records import Sidecar
from svdq.producer.storage.storage import Storage
from svdq.producer.verdicts import record_verdict
from svdq.worker.intake.finished import sample_of
from tests.faults.frames import read_frames
from tests.upscaling import by_spandrel

pytestmark = pytest.mark.slow


def finish(site, *arguments: str) -> list[str]:
    done = site.run("svdq", "submit", "--finish", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


def render(site, ranks: int = 1, *options: str, **environment: str) -> None:
    assert site.start(ranks, "--burst", *options, wait=False, **environment).end() == 0, site.groups[-1].text


@pytest.mark.long
def test_kept_latents_give_the_bits_of_upscaling_at_once_else_the_mp4_is_upscaled_and_the_notice_says_so(
    site, upscaler_file: Path, upscaler: dict[str, str]
) -> None:
    values = {"seed": 5, "frames": 3, "formats": ("png", "mp4")}
    made, at_once = site.submit(**values), site.submit(**values, upscale="2")
    flags = ("--family", "svd", "--frames", "3", "--steps", "2", "--size", "64x64", "--seed", "1", "--json")
    lines = site.run("svdq", "submit", site.photo, *flags, "--boomerang", "--format", "mp4", "--format", "png").stdout
    lines += site.run("svdq", "submit", site.photo, *flags, "--then", "").stdout
    boomerang, link, chain = (json.loads(line)["id"] for line in lines.splitlines())
    gone = site.submit(formats=("mp4",))
    render(site, 2, SVDQ_KEEP_LATENTS="1", **upscaler)
    storage = Path(site.settings.storage)
    kept = storage / "latents" / f"{made}.safetensors"
    assert {*load_file(kept)} == {"latents"}, "all that the decode needs"
    for job_id in (boomerang, link, chain, gone):
        (storage / "latents" / f"{job_id}.safetensors").unlink(missing_ok=True)
    files = {path: path.read_bytes() for path in storage.glob("outputs/**/*") if path.is_file()}
    [later] = finish(site, made[:8], "--upscale", "2")
    record_verdict(site.connection, [chain], "keep")
    of_mp4s = [
        job_id
        for which in (boomerang, "--kept")
        for job_id in finish(site, which, "--upscale", "2", "--output", "upscaled/{photo}-{seed}")
    ]
    [of_none] = finish(site, gone, "--upscale", "2")
    refused = site.run("svdq", "remove", gone, "--yes")
    assert (refused.returncode, f"is needed by job {of_none!r}" in refused.stderr) == (2, True)
    for path in storage.glob(f"outputs/photo-{gone}.*"):
        path.unlink()  # by hand
        del files[path]
    render(site, 2, **upscaler)
    assert later not in (made, at_once)
    np.testing.assert_array_equal(site.frames(later), site.frames(at_once))
    [sidecar] = site.sidecars(later)
    assert sidecar["upscaled"].items() >= {"of": "latents", "model": "tiny"}.items()
    assert sidecar["stages"] == []
    assert not {"encode", "resumed"} & {*sidecar["seconds"], *sidecar}
    assert sidecar["shown"] == {"width": 128, "height": 128}
    assert all(path.read_bytes() == data for path, data in files.items())
    for job_id, number in zip(of_mp4s, (4, 5), strict=True):
        view = site.view(job_id)
        assert view.status == "finished", view.error
        assert view.notice.endswith("upscaled from its mp4, a lossy copy")
        path = Path(view.outputs[0])
        assert path.parent.name == "upscaled"
        assert path.name == f"photo-1-{job_id}.mp4"
        assert read_frames(path).shape == (number, 128, 128, 3)
    expected = by_spandrel(upscaler_file, read_mp4(Path(site.view(boomerang).outputs[0]), (64, 64)))
    np.testing.assert_array_equal(read_frames(Path(site.view(of_mp4s[0]).outputs[1])), expected)
    assert site.view(of_none).error == (
        f"The video 'photo-{gone}' that it upscales was removed from the storage; submit it anew."
    )
    assert finish(site, made, "--upscale", "2") == [later]
    assert site.run("svdq", "remove", made, "--yes").returncode == 0
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--kept",), "No finished video is marked to keep"),
        (("--kept", "--frames", "9"), "takes no other parameter of the video"),
        (("--kept", "--variations", "2"), "takes no other parameter of the video"),
        ((), "Give either IDs of finished videos, or --kept"),
        (("--kept", "--upscale", "9"), "--upscale 9 is not allowed"),
        (("0123456789abcdef0123",), "There is no job '0123456789abcdef0123'"),
    ],
)
def test_what_cannot_be_finished_is_refused(site, arguments: tuple[str, ...], reason: str) -> None:
    done = site.run("svdq", "submit", "--finish", "--upscale", "2", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_sound_of_an_mp4_is_kept_beside_its_frames(storage: Storage) -> None:
    values = {"family": "ltx", "image": f"inputs/{'0' * 64}.jpg", "name": "cup", "seed": 1, "width": 64, "height": 64}
    made = parse_job(values | {"frames": 9, "fps": 24, "steps": 8, "formats": ["mp4"]})
    sidecar = Sidecar(svdq="1", job_id="0" * 20, job=made.model_dump(mode="json"), outputs=(f"cup-{'0' * 20}.mp4",))
    tone = np.sin(np.arange(18000) / 10).astype(np.float32) / 2
    with storage.staging() as folder:
        frames = np.zeros((9, 64, 64, 3), np.uint8)
        sound = Sound.of(np.stack([tone, -tone]), 48000)
        write_video(frames, folder / "a.mp4", "mp4", 24, "", sound=sound)
        storage.publish(folder / "a.mp4", made.output_keys(sidecar.job_id)["mp4"])
    storage.write_text(made.sidecar_key(sidecar.job_id), sidecar.text)
    job = parse_job(made.model_dump() | {"finishes": f"cup-{'0' * 20}", "upscale": "2"})
    found = sample_of(storage, None, ModelInfo(name="ltx", notice="", sound_rate=48000), "1" * 20, job)
    assert (found.step, found.job_id, found.upscaled) == (8, "1" * 20, {"of": "mp4"})
    assert found.tensors["shown"].shape == (9, 64, 64, 3)
    middle = slice(5000, 13000)
    assert np.abs(found.tensors["sound"].numpy()[:, middle] - np.stack([tone, -tone])[:, middle]).max() < 0.05


@pytest.mark.long
def test_latents_are_decoded_in_rounds(site, upscaler_file: Path, upscaler: dict[str, str]) -> None:
    model = "simulated:step_ms=1,segments=1+1,load_ms=1"
    values = {"frames": 2, "steps": 2, "formats": ("png",)}
    jobs = [site.submit(**values, seed=seed) for seed in range(3)]
    render(site, 1, "--experts", "rounds", model=model, SVDQ_KEEP_LATENTS="1")
    later = finish(site, *jobs, "--upscale", "2")
    render(site, 1, "--experts", "rounds", model=model, **upscaler)
    for made, job_id in zip(jobs, later, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), by_spandrel(upscaler_file, site.frames(made)))
