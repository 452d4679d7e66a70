"""Which expert does which step, and a scheduler that all videos of a schedule share."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.models.sigmas import SCHEDULES
from svdq.pipeline.models.wan.denoiser import Schedule
from svdq.pipeline.models.wan.family import FAMILY, PUBLISHED, WanParameters
from svdq.pipeline.models.wan.tiny import WAN_SCHEDULERS
from svdq.pipeline.planning.binding import Segment

pytestmark = pytest.mark.slow


SIGMAS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12, unique=True).map(
    lambda found: sorted(found, reverse=True)
)


@given(
    kind=st.sampled_from([*WAN_SCHEDULERS]),
    steps=st.integers(1, 60),
    shift=st.one_of(st.sampled_from([1.0, 3.0, 5.0, 8.0, 12.0]), st.floats(0.01, 100)),
    ratio=st.sampled_from([0.055, 0.57, 0.8, 0.833, 0.875, 0.9, 0.999]),
    sigmas=st.one_of(st.none(), st.sampled_from([*SCHEDULES]), SIGMAS),
)
@settings(max_examples=300, deadline=None)
def test_the_expert_of_a_step_is_the_one_that_diffusers_chooses(kind, steps, shift, ratio, sigmas):
    steps = len(sigmas) if isinstance(sigmas, list) else steps
    facts = {"scheduler": WAN_SCHEDULERS[kind] | {"_class_name": kind}, "boundary_ratio": ratio, "sigmas": sigmas}
    schedule = Schedule(steps, shift, facts)
    # (6) of diffusers' `__call__`.
    expected = ["transformer" if t >= ratio * 1000 else "transformer_2" for t in schedule.timesteps]
    assert schedule.components == expected


def segments(facts: Any = PUBLISHED, **given: Any) -> tuple[Segment, ...]:
    return FAMILY.unit_costs(FAMILY.complete(WanParameters(seed=1, **given), facts), facts).segments


def test_the_published_model_has_15_noisy_steps_of_40():
    assert segments() == (
        Segment(component="transformer", start=0, stop=15),
        Segment(component="transformer_2", start=15, stop=40),
    )


def test_an_expert_without_steps_has_no_segment():
    for ratio, component in ((0.0, "transformer"), (1.0, "transformer_2")):
        found = segments(PUBLISHED | {"boundary_ratio": ratio}, steps=8)
        assert found == (Segment(component=component, start=0, stop=8),)
    one = segments(PUBLISHED | {"boundary_ratio": None}, steps=8)
    assert one == (Segment(component="transformer", start=0, stop=8),)


def test_an_expert_without_guidance_costs_half_a_step():
    video = FAMILY.complete(WanParameters(seed=1, guidance_scale=3.5, guidance_scale_2=1.0), PUBLISHED)
    found = FAMILY.unit_costs(video, PUBLISHED)
    assert found.steps == [1.0] * 15 + [0.5] * 25
    unguided = video.model_copy(update={"guidance_scale": 1.0})
    assert FAMILY.unit_costs(unguided, PUBLISHED).step_work == found.step_work / 2


def test_a_step_leaves_the_scheduler_as_it_was():
    shared = Schedule(3, 3.0, PUBLISHED)
    state = {"latents": torch.ones(1, 2)}
    first = shared.step(torch.ones(1, 2), 0, state)
    assert state.keys() == {"latents"}
    shared.step(torch.ones(1, 2), 1, state | first)
    again = shared.step(torch.ones(1, 2), 0, state)
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        name: tensor.tolist() for name, tensor in first.items()
    }
