"""Real groups with an upscaler: the bits of the model on any number of ranks, kills, chains, and groups without one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from svdq.worker.intake.source import Intake
from tests.faults.frames import read_frames
from tests.upscaling import by_spandrel

pytestmark = pytest.mark.slow


def test_frames_are_those_of_the_model_and_chains_hand_on_what_is_not_upscaled(
    site, upscaler_file: Path, upscaler: dict[str, str]
) -> None:
    values = {"seed": 5, "frames": 3, "formats": ("png", "mp4")}
    plain, *jobs = (site.submit(**values, upscale=upscale) for upscale in (None, "2", "128x96"))
    flags = ("--family", "svd", "--frames", "3", "--steps", "2", "--size", "64x64", "--seed", "1", "--then", "")
    upscaled_links, plain_links = (
        [json.loads(line)["id"] for line in site.run("svdq", "submit", site.photo, *flags, *more).stdout.splitlines()]
        for more in (("--json", "--upscale", "2"), ("--json",))
    )
    assert site.start(3, "--burst", wait=False, **upscaler).end() == 0, site.groups[-1].text
    expected = by_spandrel(upscaler_file, site.frames(plain))
    np.testing.assert_array_equal(site.frames(jobs[0]), expected)
    for frame, image in zip(site.frames(jobs[1]), map(Image.fromarray, expected), strict=True):
        cropped = image.resize((128, 96), Image.Resampling.LANCZOS, box=(0, 16, 128, 112))
        np.testing.assert_array_equal(frame, np.asarray(cropped))
    [mp4] = [path for path in site.view(jobs[1]).outputs if path.endswith(".mp4")]
    assert read_frames(Path(mp4)).shape == (3, 96, 128, 3)
    [without], [sidecar] = site.sidecars(plain), site.sidecars(jobs[0])
    assert sidecar["job"]["upscale"] == "2"
    assert sidecar["upscaled"].items() >= {"model": "tiny"}.items()
    assert sidecar["shown"] == {"width": 128, "height": 128}
    assert sidecar["seconds"]["upscale"] > 0
    assert not {"upscaled", "shown"} & without.keys()
    assert "upscale" not in without["job"].keys() | without["seconds"].keys()
    last = [Path(site.settings.storage) / "inputs" / f"{job_id}.png" for job_id in (*upscaled_links, *plain_links)]
    assert last[0].read_bytes() == last[2].read_bytes()
    assert last[1].read_bytes() == last[3].read_bytes()
    for job_id, number in zip(upscaled_links, (3, 5), strict=True):
        assert read_frames(Path(site.view(job_id).outputs[0])).shape == (number, 128, 128, 3)


@pytest.mark.long
def test_a_kill_in_the_upscaling_loses_no_video(site, upscaler_file: Path, upscaler: dict[str, str], until) -> None:
    values = {"width": 256, "height": 256, "frames": 2, "steps": 4, "formats": ("png",)}
    jobs = [site.submit(**values, seed=number, upscale="2") for number in range(8)]
    plain = [site.submit(**values, seed=number) for number in range(8)]
    group = site.start(2, **upscaler)
    # The last step is done, and there is no file: of two frames, the preview decodes both at once.
    at_work = until(lambda: [each for each in jobs if site.view(each).step == 4 and not site.view(each).ended])
    group.kill_all()
    assert not site.view(at_work[0]).ended
    assert site.start(2, "--burst", wait=False, **upscaler).end() == 0, site.groups[-1].text
    assert site.states([*jobs, *plain]) == ["finished"] * 16
    for upscaled, job_id in zip(jobs, plain, strict=True):
        np.testing.assert_array_equal(site.frames(upscaled), by_spandrel(upscaler_file, site.frames(job_id)))
    assert len(site.sidecars()) == 16


def test_a_group_without_an_upscaler_says_what_to_do(site, open_intake: Callable[..., Intake]) -> None:
    job_id, other = site.submit(upscale="2"), site.submit()
    request = open_intake().take()
    assert request is not None
    assert request.job_id == other
    [view] = site.wait([job_id])
    assert view.error == (
        "The job asks for upscale 2, and this worker has no upscaler: start it with SVDQ_UPSCALER, such as a "
        "RealESRGAN model, and `svdq retry` the job, or submit it without upscale."
    )


def test_a_file_that_is_no_upscaler_is_refused_at_the_start(site, upscaler: dict[str, str], tmp_path: Path) -> None:
    save_file({"conv.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    upscaler["SVDQ_UPSCALER"] = "other.safetensors"
    done = site.run("svdq", "worker", "--device", "cpu", "--ranks", "1", **upscaler)
    assert done.returncode == 2
    assert (
        f"The file '{tmp_path}/other.safetensors' is no upscaler that spandrel knows; set SVDQ_UPSCALER" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_an_upscaler_that_is_not_there_is_refused_at_the_start(site) -> None:
    done = site.run("svdq", "worker", "--ranks", "1", SVDQ_UPSCALER="none.safetensors")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: There is no upscaler 'none.safetensors', neither as a file nor in ")
    assert done.stderr.count("\n") == 1
