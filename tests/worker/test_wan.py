"""Real groups with a model of two experts: each rank loads what it needs, and frames equal diffusers' in any case."""

from pathlib import Path

import numpy as np
import pytest

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.pipeline import ranks
from tests.pipeline.models.wan_files import write_model_file
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

VIDEO = {"family": "wan", "prompt": "Ein Hund läuft.", "frames": 5, "width": 64, "height": 64, "seed": 5}
VIDEOS = [{"steps": 6}, {"steps": 3, "guidance_scale": 1.0}, {"steps": 4, "flow_shift": 0.05, "width": 96}]
#: Leaves a line for each file that a Python program opens, where the test asked for it.
AUDIT = """
import os, sys

def note(event, arguments):
    if event == "open" and "transformer" in str(arguments[0]):
        line = f"{os.environ.get('RANK', '-')} {arguments[0]}\\n".encode()
        descriptor = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line)
        os.close(descriptor)

sys.addaudithook(note)
"""


def submit(site, **options) -> str:
    return site.submit(formats=("png",), **(VIDEO | options))


@pytest.fixture(scope="module")
def reference(tiny_wan: Path):
    """Render a submitted video with diffusers, with the defaults of the model."""

    def render(photo: Path, **options) -> np.ndarray:
        values = FAMILY.complete(WanParameters.model_validate(VIDEO | options), FAMILY.read_facts(tiny_wan, "tiny"))
        return diffusers_frames(tiny_wan, prepare_photo(photo.read_bytes(), values.width, values.height), values)

    return render


@pytest.mark.long
def test_layers_that_multiply_in_int8_make_the_same_frames_after_a_kill(site, until, wide_wan: Path) -> None:
    model = write_model_file(site.folder, wide_wan, "convrot.safetensors", lora=True)
    jobs = [submit(site, steps=16, seed=seed) for seed in (5, 6, 7)]
    arguments = ("--weights", "native")
    group = site.start(3, *arguments, model=str(model))
    until(lambda: any((site.settings.home / "checkpoints").glob("*/*.safetensors")), lambda: group.text)
    group.kill_all()
    second = site.start(2, "--burst", *arguments, model=str(model), wait=False)
    assert second.end() == 0, second.text
    assert "Layers multiply in int8, as their files store them." in second.text
    facts = resolve(str(model)).facts
    values = [WanParameters.model_validate(VIDEO | {"steps": 16, "seed": seed}) for seed in (5, 6, 7)]
    photo = prepare_photo(site.photo.read_bytes(), 64, 64)
    options = ComputeOptions(weights="stored", native=("int8",))
    expected = ranks.render(
        str(model), photo, [FAMILY.complete(each, facts) for each in values], num_ranks=1, options=options
    )
    for job_id, frames in zip(jobs, expected, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), frames)
    sidecars = [sidecar for job_id in jobs for sidecar in site.sidecars(job_id)]
    assert all(sidecar["model"]["compute"]["native"] == ["int8"] for sidecar in sidecars)
    assert any(sidecar.get("resumed") for sidecar in sidecars)


@pytest.mark.long
def test_a_text_encoder_without_room_comes_for_new_prompts(site, tiny_wan: Path, reference) -> None:
    prompts = ("A dog runs.", "A cat sleeps.", "A dog runs.", "A dog runs.", "A cat sleeps.")
    jobs = [submit(site, prompt=prompt, steps=3 + n % 2) for n, prompt in enumerate(prompts)]
    options = ("--experts", "bound", "--memory-limit", "300MB", "--host-memory", "0")
    group = site.start(2, "--burst", *options, model=str(tiny_wan), wait=False)
    assert group.end() == 0, group.text
    assert "the transformer leaves for each encode" in group.text
    assert 1 <= group.text.count("Loaded the text encoder in") <= 2, group.text
    for n, (job_id, prompt) in enumerate(zip(jobs, prompts, strict=True)):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, prompt=prompt, steps=3 + n % 2))


def test_ranks_that_open_one_expert_each_make_diffusers_frames(site, tiny_wan: Path, reference, tmp_path: Path) -> None:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "sitecustomize.py").write_text(AUDIT)
    opened = tmp_path / "opened"
    environment = {"PYTHONPATH": str(tmp_path / "audit"), "OPENED": str(opened)}
    jobs = [submit(site, **video) for video in VIDEOS]
    group = site.start(2, "--experts", "bound", model=str(tiny_wan), **environment)
    site.wait(jobs)
    assert "Each rank loads the experts of its steps" in group.text
    for job_id, video in zip(jobs, VIDEOS, strict=True):
        np.testing.assert_array_equal(site.frames(job_id), reference(site.photo, **video))
    high, low = (Path(f"/proc/{rank.pid}/maps").read_text() for rank in group.ranks())
    assert "/transformer/" in high
    assert "/transformer_2/" not in high
    assert "/transformer_2/" in low
    assert "/transformer/" not in low
    lines = [line.split(" ", 1) for line in opened.read_text().splitlines()]
    weights = {rank: {path for number, path in lines if number == rank and ".safetensors" in path} for rank in "01"}
    assert not any("transformer_2" in path for path in weights["0"])
    assert not any("transformer/" in path for path in weights["1"])
