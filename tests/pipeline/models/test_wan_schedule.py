"""Which expert does which step: without torch the same as diffusers', for any number of steps and shift."""

import itertools

import pytest
import torch

from svdq.pipeline.models.family import Segment
from svdq.pipeline.models.wan import schedule
from svdq.pipeline.models.wan.denoiser import Schedule
from svdq.pipeline.models.wan.family import FAMILY, PUBLISHED
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.models.wan.tiny import SCHEDULERS

STEPS = [1, 2, 3, 4, 5, 7, 8, 20, 25, 30, 40, 50, 99, 100]
SHIFTS = [0.01, 0.5, 1.0, 2.7, 3.0, 5.0, 8.0, 12.0, 100.0]
#: Ratios of which a thousandth is a timestep that occurs, and those that are no exact binary fractions.
BOUNDARIES = [0.0, 0.055, 0.57, 0.833, 0.875, 0.9, 0.93, 0.999, 1.0]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_timesteps_and_experts_are_those_of_diffusers(kind):
    import diffusers

    both = getattr(diffusers, kind)(**SCHEDULERS[kind])
    setting = schedule.SHIFT_SETTINGS[kind]
    for steps, shift in itertools.product(STEPS, SHIFTS):
        scheduler = type(both).from_config(both.config, **{setting: shift})
        scheduler.set_timesteps(steps)
        ours = schedule.timesteps(steps, shift, dict(both.config) | {"_class_name": kind})
        assert ours == scheduler.timesteps.tolist(), (steps, shift)
        for ratio in BOUNDARIES:
            boundary = ratio * scheduler.config.num_train_timesteps
            # (6) of diffusers' `__call__`.
            expected = ["transformer" if t >= boundary else "transformer_2" for t in scheduler.timesteps]
            assert schedule.components(ours, boundary) == expected
            assert Schedule(scheduler, boundary).components == expected


def test_the_published_model_has_15_noisy_steps_of_40():
    usual = WanParameters(seed=1)
    assert FAMILY.segments(usual, PUBLISHED) == (
        Segment(component="transformer", start=0, stop=15),
        Segment(component="transformer_2", start=15, stop=40),
    )


def test_an_expert_without_steps_has_no_segment():
    for ratio, component in ((0.0, "transformer"), (1.0, "transformer_2")):
        found = FAMILY.segments(WanParameters(seed=1, steps=8), PUBLISHED | {"boundary_ratio": ratio})
        assert found == (Segment(component=component, start=0, stop=8),)
    one = FAMILY.segments(WanParameters(seed=1, steps=8), PUBLISHED | {"boundary_ratio": None})
    assert one == (Segment(component="transformer", start=0, stop=8),)


def test_a_scheduler_is_left_as_it_was():
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(**SCHEDULERS["UniPCMultistepScheduler"])
    scheduler.set_timesteps(3)
    shared = Schedule(scheduler, None)
    state = {"latents": torch.ones(1, 2)}
    shared.step(torch.ones(1, 2), 0, state)
    assert scheduler.model_outputs == [None, None]
    assert scheduler.step_index is None
    assert scheduler.last_sample is None
    assert state.keys() == {"latents"}
