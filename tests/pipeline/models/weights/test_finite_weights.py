"""Weights that went bad on the disk: who reads why a video failed is told of them."""

import shutil
from dataclasses import replace

import PIL.Image
import pytest
import torch

from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import LAYOUT
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role, nan_advice
from svdq.pipeline.models.weights.model_folder import check_folder
from tests.pipeline.fakes import Alone, CountingModel, request

CPU = torch.device("cpu")


def go_bad(file, at: float) -> None:
    """Put 4 KiB of 0xff, which are NaN in every type, into a file."""
    with file.open("r+b") as opened:
        opened.seek(int(file.stat().st_size * at))
        opened.write(b"\xff" * 4096)


@pytest.mark.parametrize(("component", "at"), [("unet", 0.5), ("image_encoder", 0.5), ("vae", 0.9)])
def test_a_weight_that_is_no_number_is_named(tiny_model, tmp_path, component: str, at: float) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    go_bad(next((folder / component).glob("*.safetensors")), at)
    check_folder(folder, str(folder), LAYOUT)  # nothing of it is seen in any header
    model = SvdModel(resolve(str(folder)), Role.of_rank(0), CPU, torch.float32)
    asked = replace(request(1, steps=1, frames=2), photo=PIL.Image.new("RGB", (64, 64), "gray"))
    alone = Alone(model, [asked])
    alone.stage.run()
    failure = str(alone.source.reports["job-1"].failure)
    weight = model.broken_weights()
    assert weight.startswith(f"{component} (")
    assert "NaN or infinite" in failure or "NaN or infinity" in failure
    assert failure.endswith(f"the weights of {weight} are not finite; fetch the model {folder} again.")


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("float32", "try another seed."),
        ("bfloat16", "try another seed."),
        ("float16", "try another seed, or float32 in place of float16."),
    ],
)
def test_only_who_computes_in_float16_is_sent_to_float32(dtype: str, advice: str) -> None:
    model = CountingModel()
    model.info = replace(model.info, compute={"dtype": dtype})
    assert nan_advice(model) == f"; {advice}"


def test_weights_that_are_quantised_are_looked_at(tiny_model) -> None:
    model = SvdModel(resolve(str(tiny_model)), Role(), CPU, torch.float32, ComputeOptions(approximate=("int8",)))
    assert model.broken_weights() == ""
