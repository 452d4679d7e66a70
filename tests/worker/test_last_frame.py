"""Real groups that make videos between two photos, and loops: frames equal diffusers', files have the right number."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.faults.frames import read_frames
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.long

VIDEO = {"family": "wan", "prompt": "It opens.", "frames": 9, "steps": 5, "width": 64, "height": 64, "seed": 5}
FLAGS = ("--prompt=It opens.", "--frames=9", "--steps=5", "--size=64x64", "--seed=5", "--format=png", "--format=mp4")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for number in range(2):
        for name in (f"{number}.jpg", f"{number}.last.png"):
            Image.frombytes("RGB", (90, 70), os.urandom(90 * 70 * 3)).save(folder / name)
    return folder


def reference(folder: Path, photo: Path, last_photo: Path, **options: int) -> np.ndarray:
    """Render with diffusers, whose arguments are prepared photos."""
    values = FAMILY.complete(WanParameters.model_validate(VIDEO | options), FAMILY.read_facts(folder, "tiny"))
    image, last_image = (prepare_photo(path.read_bytes(), 64, 64) for path in (photo, last_photo))
    return diffusers_frames(folder, image, values, last_image=last_image)


def test_a_folder_of_pairs_and_a_loop(site, tiny_wan: Path, pairs: Path) -> None:
    made = site.run("svdq", "submit", pairs, *FLAGS)
    assert (made.returncode, made.stdout.count("svdq wait")) == (0, 2), made.stderr
    assert site.run("svdq", "submit", site.photo, "--loop", *FLAGS).returncode == 0
    job_ids = site.queued()
    group = site.start(2, "--burst", model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    *of_pairs, loop = (site.view(job_id) for job_id in job_ids)
    for number, view in enumerate(of_pairs):
        expected = reference(tiny_wan, pairs / f"{number}.jpg", pairs / f"{number}.last.png")
        np.testing.assert_array_equal(site.frames(view.id), expected)
    expected = reference(tiny_wan, site.photo, site.photo)
    np.testing.assert_array_equal(site.frames(loop.id), expected[:-1])
    for view in (*of_pairs, loop):
        [mp4] = [path for path in view.outputs if path.endswith(".mp4")]
        assert len(read_frames(Path(mp4))) == (8 if view is loop else 9)
    [sidecar] = site.sidecars(loop.id)
    assert (sidecar["job"]["loop"], sidecar["shown"]["frames"], "last_image" in sidecar["job"]) == (True, 8, False)
