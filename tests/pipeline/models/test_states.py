"""States that somebody else may have written: each model accepts its own and refuses others with a clause."""

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters

PARAMETERS = SvdParameters(seed=3, steps=9, frames=2, width=64, height=64)


@pytest.fixture(scope="module", params=["tiny", "preview", "simulated"])
def model(request, tiny_model):
    name = str(tiny_model) if request.param == "tiny" else request.param
    return open_model(resolve(name), Role.of_rank(0), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def state(model, image):
    return model.encode(image, PARAMETERS)


def test_a_state_is_accepted_after_any_step(model, state) -> None:
    model.check_state(state, PARAMETERS)
    model.check_state({**state, **model.denoiser(state, PARAMETERS).step(state, 0)}, PARAMETERS)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tensor: tensor[:, :1], "of shape"),
        (lambda tensor: torch.cat([tensor, tensor]), "of shape"),
        (lambda tensor: tensor[..., :-1], "of shape"),
        (lambda tensor: tensor.flatten(3), "of shape"),
        (lambda tensor: torch.zeros(()), "of shape"),
        (lambda tensor: tensor.to(torch.bfloat16), "are bfloat16"),
        (lambda tensor: tensor.to(torch.int64), "are int64"),
    ],
)
def test_latents_of_another_shape_or_dtype_are_refused(model, state, damage, words) -> None:
    with pytest.raises(ValueError, match=f"its latents are {words}|its latents {words}"):
        model.check_state({**state, "latents": damage(state["latents"])}, PARAMETERS)


@pytest.mark.parametrize("name", ["preview", "simulated:step_ms=0"])
def test_preview_and_simulated_make_videos_of_any_family(name, image) -> None:
    model = open_model(resolve(name), Role.of_rank(0), torch.device("cpu"), torch.float32)
    asked = WanParameters(seed=3, prompt="Ein Hund läuft.", width=64, height=64, frames=5)
    values = model.complete(asked)
    assert (values.prompt, values.steps, values.frames) == (asked.prompt, 40, 5)
    state = dict(model.encode(image, values))
    model.check_state(state, values)
    denoiser = model.denoiser(state, values)
    for index in range(values.steps):
        state |= denoiser.step(state, index)
    assert model.decode(state, values, 5).shape == (5, 64, 64, 3)


def test_a_model_of_one_family_refuses_videos_of_another_with_a_sentence(tiny_model) -> None:
    model = open_model(resolve(str(tiny_model)), Role(), torch.device("cpu"), torch.float32)
    with pytest.raises(InputError, match="makes videos of Stable Video Diffusion, and this one is for Wan: start a"):
        model.complete(WanParameters(seed=3))


def test_a_state_without_one_of_its_tensors_is_refused(model, state) -> None:
    for name in state:
        with pytest.raises(ValueError, match=f"it has no {name}"):
            model.check_state({other: tensor for other, tensor in state.items() if other != name}, PARAMETERS)
