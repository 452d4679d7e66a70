"""Which expert does which step, and a scheduler that all videos of a schedule share."""

import pytest
import torch

from svdq.pipeline.models.tiny import WAN_SCHEDULERS
from svdq.pipeline.models.wan.denoiser import Schedule
from svdq.pipeline.models.wan.family import FAMILY, PUBLISHED, WanParameters
from svdq.pipeline.planning.binding import Segment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", WAN_SCHEDULERS)
def test_segments_join_the_steps_of_each_expert(kind):
    scheduler = WAN_SCHEDULERS[kind] | {"_class_name": kind}
    for steps in (1, 2, 7, 40):
        for ratio in (0.055, 0.57, 0.833, 0.9, 0.999):
            schedule = Schedule(steps, 5.0, {"scheduler": scheduler, "boundary_ratio": ratio})
            # (6) of diffusers' `__call__`.
            expected = ["transformer" if t >= ratio * 1000 else "transformer_2" for t in schedule.timesteps]
            of_steps = [each.component for each in schedule.segments for _ in range(each.start, each.stop)]
            assert of_steps == schedule.components == expected
            assert len(schedule.segments) == len(set(expected))


def test_the_published_model_has_15_noisy_steps_of_40():
    assert FAMILY.segments(WanParameters(seed=1), PUBLISHED) == (
        Segment(component="transformer", start=0, stop=15),
        Segment(component="transformer_2", start=15, stop=40),
    )


def test_an_expert_without_steps_has_no_segment():
    for ratio, component in ((0.0, "transformer"), (1.0, "transformer_2")):
        found = FAMILY.segments(WanParameters(seed=1, steps=8), PUBLISHED | {"boundary_ratio": ratio})
        assert found == (Segment(component=component, start=0, stop=8),)
    one = FAMILY.segments(WanParameters(seed=1, steps=8), PUBLISHED | {"boundary_ratio": None})
    assert one == (Segment(component="transformer", start=0, stop=8),)


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
