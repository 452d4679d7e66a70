"""Models with and without a family of their own."""

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from tests.pipeline.rendering import render


@pytest.mark.parametrize("name", ["preview", "simulated:step_ms=0"])
def test_preview_and_simulated_make_videos_of_any_family(name, image) -> None:
    model = open_model(resolve(name), Role.of_rank(0), torch.device("cpu"), torch.float32)
    asked = WanParameters(seed=3, prompt="Ein Hund läuft.", width=64, height=64, frames=5)
    values = model.complete(asked)
    assert (values.prompt, values.steps, values.frames) == (asked.prompt, 40, 5)
    assert render(model, image, values).shape == (5, 64, 64, 3)


def test_a_model_of_one_family_refuses_videos_of_another_with_a_sentence(tiny_model) -> None:
    model = open_model(resolve(str(tiny_model)), Role(), torch.device("cpu"), torch.float32)
    with pytest.raises(InputError, match="makes videos of Stable Video Diffusion, and this one is for Wan: start a"):
        model.complete(WanParameters(seed=3))
