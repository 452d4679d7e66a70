"""The simulated model with two experts."""

import pytest
import torch

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.models.families import parse_parameters
from svdq.pipeline.models.names.model_names import timings_of
from svdq.pipeline.models.simulated import SimulatedModel
from svdq.pipeline.models.video_model import Role

CPU = torch.device("cpu")


def open_simulated(name: str, *components: str) -> SimulatedModel:
    role = Role(encode=True, components=frozenset(components) if components else None, decode=True)
    return SimulatedModel(timings_of(name), role, CPU)


def video(steps: int):
    return parse_parameters({"seed": 1, "steps": steps, "frames": 2, "width": 64, "height": 64})


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (40, [("simulated", 0, 15), ("simulated_2", 15, 40)]),
        (8, [("simulated", 0, 3), ("simulated_2", 3, 8)]),
        (4, [("simulated", 0, 2), ("simulated_2", 2, 4)]),
        (1, [("simulated_2", 0, 1)]),
    ],
)
def test_segments_follow_the_number_of_steps(steps: int, expected: list[tuple[str, int, int]]) -> None:
    segments = open_simulated("simulated:segments=15+25").segments(video(steps))
    assert [(segment.component, segment.start, segment.stop) for segment in segments] == expected


def test_a_rank_does_only_the_steps_of_its_experts() -> None:
    name, parameters = "simulated:step_ms=0,segments=15+25", video(8)
    first, second = open_simulated(name, "simulated"), open_simulated(name, "simulated_2")
    state = first.encode(None, parameters)
    denoiser = first.denoiser(state, parameters)
    for index in range(3):
        state |= denoiser.step(state, index)
    with pytest.raises(SampleError, match="Step 3 came to a rank that does not have"):
        denoiser.step(state, 3)
    denoiser = second.denoiser(state, parameters)
    with pytest.raises(SampleError):
        denoiser.step(state, 2)
    for index in range(3, 8):
        state |= denoiser.step(state, index)
    assert second.decode(state, parameters, 2).shape == (2, 64, 64, 3)


@pytest.mark.parametrize("segments", ["15", "15+", "0+25", "15+25+1", "1e3+2", "a+b", "-1+2"])
def test_wrong_segments_are_one_sentence(segments: str) -> None:
    with pytest.raises(InputError, match=r"written like 15\+25"):
        open_simulated(f"simulated:segments={segments}")


def test_steps_leave_the_state_that_they_began_with() -> None:
    """It may be a checkpoint that is not written yet."""
    model, parameters = open_simulated("simulated:step_ms=0"), video(3)
    state = model.encode(None, parameters)
    before = state["latents"].clone()
    model.denoiser(state, parameters).step(state, 0)
    assert torch.equal(state["latents"], before)
