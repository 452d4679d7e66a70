"""Real groups that skip steps: frames equal diffusers' on any number of ranks, in rounds, with LoRAs, after kill -9."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from svdq.cli.formatting import describe
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.pipeline.models.weights.test_job_loras import save_loras
from tests.pipeline.references import open_diffusers
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

VIDEO = {"family": "wan", "prompt": "Ein Hund läuft.", "frames": 5, "width": 64, "height": 64, "seed": 5}
VIDEOS: list[dict[str, Any]] = [
    {"steps": 14, "step_cache": 0.06},
    {"steps": 14},
    {"steps": 9, "step_cache": 0.3, "loop": True},
    {"steps": 12, "step_cache": 0.1, "guidance_scale": 1.0, "width": 96},
]
IN_ROUNDS = ("--memory-limit", "300MB")


def submit(site: Any, **options: Any) -> str:
    return str(site.submit(formats=("png",), **(VIDEO | options)))


def expected(site: Any, folder: Path, *, last: Path | None = None, **options: Any) -> Any:
    """Render a submitted video with diffusers, with the defaults of the model."""
    values = FAMILY.complete(WanParameters.model_validate(VIDEO | options), FAMILY.read_facts(folder, "tiny"))
    photo, *last_photo = (
        prepare_photo(path.read_bytes(), values.width, values.height) for path in (site.photo, last) if path
    )
    more = {"last_image": last_photo[0]} if last_photo else {}
    frames = diffusers_frames(folder, photo, values, **more)
    return frames[:-1] if values.loop else frames


@pytest.fixture
def last_photo(tmp_path: Path) -> Path:
    """A photo of the last frame."""
    Image.effect_noise((90, 70), 60).convert("RGB").save(tmp_path / "last.png")
    return tmp_path / "last.png"


def with_loras(base: Path, folder: Path, file: Path, strength: float) -> Path:
    """Copy a model with a LoRA that diffusers has fused into both experts."""
    shutil.copytree(base, folder)
    pipeline = open_diffusers("wan", str(base), torch.float32)
    for component in ("transformer", "transformer_2"):
        pipeline.load_lora_weights(str(file), load_into_transformer_2=component == "transformer_2")
        pipeline.fuse_lora(components=[component], lora_scale=strength)
        pipeline.unload_lora_weights()
        getattr(pipeline, component).save_pretrained(folder / component)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "options"), [(3, ()), (1, IN_ROUNDS)])
def test_frames_are_those_of_diffusers(site, tiny_wan: Path, ranks: int, options: tuple[str, ...]) -> None:
    jobs = [submit(site, **video) for video in VIDEOS]
    group = site.start(ranks, "--burst", *options, model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    for job_id, video in zip(jobs, VIDEOS, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), expected(site, tiny_wan, **video))
    [sidecar] = site.sidecars(jobs[0])
    assert sidecar["job"]["step_cache"] == 0.06
    assert sidecar["model"]["notice"].endswith("approximate (7 of 14 steps computed)")
    assert sum(stage["steps"] for stage in sidecar["stages"]) == 14
    assert "approximate" not in site.sidecars(jobs[1])[0]["model"]["notice"]


@pytest.mark.long
def test_loras_and_a_last_photo_are_those_of_diffusers(site, wide_wan: Path, tmp_path: Path, last_photo: Path) -> None:
    loras = tmp_path / "loras"
    loras.mkdir()
    save_loras(loras, wide_wan)
    flags = ("--prompt=Ein Hund läuft.", "--frames=5", "--steps=14", "--size=64x64", "--seed=5", "--format=png")
    flags = (*flags, "--step-cache=1.2x", "--last", last_photo)
    environment = {"SVDQ_LORAS": str(loras), "SVDQ_MODEL": str(wide_wan)}
    for more in ((), ("--lora=both:-0.5", "--force")):
        made = site.run("svdq", "submit", site.photo, *flags, *more, **environment)
        assert made.returncode == 0, made.stderr
    plain, with_lora = site.queued()
    group = site.start(2, "--burst", model=str(wide_wan), wait=False, SVDQ_LORAS=str(loras))
    assert group.end() == 0, group.text
    video = {"steps": 14, "step_cache": site.sidecars(plain)[0]["job"]["step_cache"], "last": last_photo}
    assert video["step_cache"] > 0
    np.testing.assert_array_equal(site.frames(plain), expected(site, wide_wan, **video))
    fused = with_loras(wide_wan, tmp_path / "fused", loras / "both.safetensors", -0.5)
    np.testing.assert_array_equal(site.frames(with_lora), expected(site, fused, **video))
    assert not np.array_equal(site.frames(plain), site.frames(with_lora))


@pytest.mark.long
def test_a_rank_that_is_killed_costs_no_bit(site, tiny_wan: Path, until) -> None:
    video = {"steps": 80, "step_cache": 0.06, "width": 320, "height": 192}  # large enough to be seen in flight
    job_id, plain = submit(site, **video), submit(site, steps=40)
    group = site.start(3, "--experts", "bound", model=str(tiny_wan))
    until(lambda: 35 <= site.view(job_id).step < 80, lambda: group.text)  # the first expert has handed it over
    in_flight = site.view(job_id)
    assert f"step {in_flight.step} of 80 ({in_flight.computed} computed)" in describe(in_flight)
    os.kill(group.ranks()[2].pid, signal.SIGKILL)
    site.wait([job_id, plain])
    np.testing.assert_array_equal(site.frames(job_id), expected(site, tiny_wan, **video))
    np.testing.assert_array_equal(site.frames(plain), expected(site, tiny_wan, steps=40))
    (sidecar,) = site.sidecars(job_id)
    assert sidecar["resumed"]
    assert sidecar["model"]["notice"].endswith(f"approximate ({in_flight.computed} of 80 steps computed)")
