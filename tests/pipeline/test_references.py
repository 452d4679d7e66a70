"""The comparison with diffusers on folders that have half precision weights only, as some are published."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from tests.pipeline.references import call_diffusers
from tests.pipeline.rendering import pipeline_of, render

SHAPE = {"seed": 3, "frames": 5, "steps": 1, "width": 64, "height": 64}


@pytest.mark.parametrize("family", ["svd", "wan"])
def test_a_folder_of_fp16_files_is_compared(tiny_model, tiny_wan, tmp_path, family) -> None:
    folder = shutil.copytree(tiny_model if family == "svd" else tiny_wan, tmp_path / "model")
    for file in folder.rglob("*.safetensors"):
        if family == "svd" or file.parent.name != "vae":  # that of Wan computes in float32
            file.rename(file.with_suffix(".fp16.safetensors"))
    photo = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 90).convert("RGB")
    ours = open_model(
        resolve(str(folder)), Role(embed=True, encode=True, decode=True), torch.device("cpu"), torch.float16
    )
    values = ours.complete(SvdParameters(**SHAPE) if family == "svd" else WanParameters(prompt="A dog.", **SHAPE))
    frames = call_diffusers(pipeline_of(folder, torch.float16), photo, values)[0]
    np.testing.assert_array_equal(render(ours, photo, values), np.stack([np.asarray(frame) for frame in frames]))
