"""Models compute where they are put, however their weights are stored, on a device that has no host memory.

They run on torch's meta device in place of a GPU: it computes nothing, but raises an error for tensors in host memory.
"""

from pathlib import Path

import pytest
import torch

from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.planning.binding import step_costs
from tests.pipeline.models.wan_files import write_model_file

DEVICE = torch.device("meta")
MADE, STORED = ComputeOptions(weights="made"), ComputeOptions(weights="stored")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("as in the folder", MADE),
        ("as in the folder", ComputeOptions(approximate=("int8",))),
        ("scaled.safetensors", MADE),
        ("scaled.safetensors", STORED),
        ("convrot.safetensors", STORED),
        ("convrot.safetensors", ComputeOptions(weights="stored", native=("int8",))),
        ("Q4_K.gguf", STORED),
    ],
)
@pytest.mark.parametrize("lora", [False, True])
def test_steps_of_both_experts_use_nothing_in_host_memory(wide_wan: Path, tmp_path: Path, file, options, lora) -> None:
    name = str(write_model_file(tmp_path, wide_wan, file, lora=lora))
    model = open_model(resolve(name), Role(embed=True, encode=True, decode=True), DEVICE, torch.bfloat16, options)
    video = model.complete(model.family.parameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64))
    state = model.zeros(video)
    denoiser = model.denoiser(state, video, step_costs(model.segments(video)))
    for step in range(video.steps):
        state |= denoiser.step(state, step)
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
    for component in ("text_encoder", "vae", "transformer", "transformer_2"):
        module = getattr(model.pipeline, component)
        left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if not tensor.is_meta]
        assert left == []
