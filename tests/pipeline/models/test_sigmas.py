"""ComfyUI's schedules against the numbers that its functions give, and as the scheduler of a model."""

import pytest
import torch

from svdq.pipeline.models.model_file import SchedulerEntry
from svdq.pipeline.models.sigmas import SCHEDULES, sigmas_of
from svdq.pipeline.models.wan.denoiser import Schedule
from svdq.pipeline.models.wan.family import PUBLISHED, WanParameters, complete
from svdq.pipeline.models.wan.layout import use_scheduler

#: Of six steps with a shift of 5, by the functions of comfy/samplers.py with torch 2.13 and scipy 1.17.
OF_COMFYUI = {
    "simple": [1.0, 0.9617159, 0.9092149, 0.8333333, 0.7148973, 0.5005995],
    "normal": [1.0, 0.9526629, 0.8832126, 0.7714307, 0.5616499, 0.0244141],
    "sgm_uniform": [1.0, 0.9617593, 0.9097071, 0.8347121, 0.7173175, 0.5073965],
    "beta": [1.0, 0.9803711, 0.9294872, 0.8338881, 0.6558935, 0.3362573],
    "linear_quadratic": [1.0, 0.9916667, 0.9833333, 0.975, 0.8611111, 0.5361111],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_sigmas_are_those_of_comfyui(name: str) -> None:
    assert sigmas_of(name, 6, 5.0) == pytest.approx(OF_COMFYUI[name], abs=1e-6)
    for steps in (1, 2, 3, 20, 50, 100):
        found = sigmas_of(name, steps, 8.0)
        assert len(found) == steps
        assert found == sorted(set(found), reverse=True)
        assert found[0] == 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_name_fits_any_number_of_steps(name: str) -> None:
    given = SchedulerEntry.model_validate({"class": "FlowMatchEulerDiscreteScheduler", "sigmas": name})
    facts = {**PUBLISHED, **use_scheduler(PUBLISHED, given)}
    for steps, shift in ((4, 5.0), (20, 8.0)):
        assert complete(WanParameters(seed=1, steps=steps), facts).steps == steps
        schedule = Schedule(steps, shift, facts)
        assert (schedule.timesteps / 1000).tolist() == pytest.approx(sigmas_of(name, steps, shift), abs=1e-7)
        # A step of Euler's method: x + (sigma' - sigma) v.
        first, second = sigmas_of(name, steps, shift)[:2]
        moved = schedule.step(torch.ones(1, 2), 0, {"latents": torch.zeros(1, 2)})["latents"]
        assert moved.tolist() == [pytest.approx([second - first] * 2)]


def test_the_experts_change_where_the_model_file_says() -> None:
    euler = {"class": "FlowMatchEulerDiscreteScheduler", "sigmas": "simple"}
    for changed, first in (
        ({"switch_at": 1}, 1),
        ({"switch_at": 3}, 3),
        ({"boundary": 0.8}, 3),
        ({"boundary": 0.95}, 1),
    ):
        given = SchedulerEntry.model_validate(euler | changed)
        components = Schedule(4, 5.0, {**PUBLISHED, **use_scheduler(PUBLISHED, given)}).components
        assert components == ["transformer"] * first + ["transformer_2"] * (4 - first)
