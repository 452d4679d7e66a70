"""`svdq model calibrate` as a user runs it: diffusers' curve in a model file that can be used at once."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.conftest import Cli
from tests.pipeline.rendering import one_thread, pipeline_of

SIZE = ("--shape", "64x64x5", "--steps", "9", "--prompt", "A dog runs.")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.effect_noise((64, 64), 90).convert("RGB").save(path)
    return path


def diffusers_curves(folder: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> list[list[float]]:
    """What diffusers prints at the end of each transformer, for the prediction with the prompt."""
    from diffusers.hooks import MagCacheConfig

    pipeline, facts = pipeline_of(folder), FAMILY.read_facts(folder, "tiny")
    video = WanParameters(seed=0, prompt="A dog runs.", steps=9, frames=5, width=64, height=64)
    values = FAMILY.complete(video, facts)
    for segment in FAMILY.unit_costs(values, facts).segments:
        number = segment.stop - segment.start
        getattr(pipeline, segment.component).enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=number))
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, flow_shift=values.flow_shift)
    with one_thread():
        pipeline(
            prepare_photo(photo.read_bytes(), 64, 64),
            prompt=values.prompt,
            negative_prompt=values.negative_prompt,
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=9,
            guidance_scale=values.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(0),
        )
    for name in ("transformer", "transformer_2"):
        getattr(pipeline, name).disable_cache()
    printed = re.findall(r"^\[[\d., e-]+\]$", capsys.readouterr().out, re.MULTILINE)
    return [ast.literal_eval(text) for text in printed][::2]


@pytest.mark.slow
@pytest.mark.long
def test_the_curve_is_that_of_diffusers_and_is_used_at_once(
    svdq: Cli, tiny_wan: Path, photo: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    done = svdq("model", "calibrate", tiny_wan, "--photo", photo, *SIZE, "--output", "mine.toml", "--plot", "curve.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "SVDQ_MODEL=mine.toml" in done.stdout
    table = tomllib.loads((tmp_path / "mine.toml").read_text())["step_cache"]
    high, low = diffusers_curves(tiny_wan, photo, capsys)
    assert table == {"high": pytest.approx(high, abs=2e-5), "low": pytest.approx(low, abs=2e-5)}
    assert resolve("mine.toml").facts["step_cache"] == {"high": tuple(table["high"]), "low": tuple(table["low"])}
    again = svdq("model", "calibrate", "mine.toml", "--photo", photo, *SIZE)
    assert again.returncode == 2
    assert "The model file 'mine.toml' has a step_cache; remove it to measure it again." in again.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("preview", "The model preview is not one of Wan"),
        ("nothere", "There is no model folder 'nothere'"),
        ("old.toml", "There is a file"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    svdq: Cli, photo: Path, tmp_path: Path, monkeypatch, model: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.toml").touch()
    options = ("--output", "old.toml") if model == "old.toml" else ()
    done = svdq("model", "calibrate", model.replace("old.toml", "some/model"), "--photo", photo, *options)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert words in done.stderr
