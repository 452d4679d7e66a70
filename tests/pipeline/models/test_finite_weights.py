"""Weights that went bad on the disk: who reads why a video failed is told of them."""

import shutil
from dataclasses import replace

import PIL.Image
import pytest
import torch

from svdq.pipeline.failures import describe_non_finite
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.options import ComputeOptions
from svdq.pipeline.models.svd.layout import LAYOUT
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.sample import Sample
from tests.pipeline.fakes import Alone, CountingModel, ListMonitor, request

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
    model = SvdModel(str(folder), Role.of_rank(0), CPU, torch.float32)
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
    model.nan = {1: 0}
    sample = Sample(
        job_id="job",
        parameters=SvdParameters(seed=1, steps=1, frames=2, width=64, height=64),
        boundaries=(0, 1),
        step=0,
        tensors={"latents": torch.zeros(1, 2, 4, 8, 8)},
    )
    said = describe_non_finite(model, sample, 1, ListMonitor())
    assert said == f"The latents became NaN or infinite in step 1 of 1; {advice}"


def test_weights_that_are_quantised_are_looked_at(tiny_model) -> None:
    pytest.importorskip("torchao")
    model = SvdModel(str(tiny_model), Role(), CPU, torch.float32, ComputeOptions(approximate=("int8",)))
    assert model.broken_weights() == ""
