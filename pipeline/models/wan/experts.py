"""Which expert does which step of a video: the noise levels of diffusers' schedulers. Does not import torch.

Arithmetic is diffusers', so that a timestep beside the boundary falls on the same side: float64 in UniPC, whose
timesteps are whole, and float32 where FlowMatchEuler has it.
"""

from collections.abc import Sequence

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.sigmas import float32, sigmas_of
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE

_BELOW_ONE = 1e-6  # UniPC's first level is this far below 1, whose logarithm it cannot take


def experts_of(steps: int, shift: float, facts: Facts) -> list[str]:
    """Return the component of each step, by the comparison of diffusers' `__call__` (6)."""
    if facts["boundary_ratio"] is None:
        return [HIGH_NOISE] * steps
    if (first := facts.get("switch_at")) is not None:
        return [HIGH_NOISE if index < first else LOW_NOISE for index in range(steps)]
    boundary = float32(facts["boundary_ratio"] * facts["scheduler"].get("num_train_timesteps", 1000))
    return [HIGH_NOISE if t >= boundary else LOW_NOISE for t in timesteps_of(steps, shift, facts)]


def timesteps_of(steps: int, shift: float, facts: Facts) -> list[float]:
    """Return the timestep of each step, as `set_timesteps` of the scheduler of the facts computes it."""
    given = facts.get("sigmas")
    if isinstance(given, str):
        given, shift = sigmas_of(given, steps, shift), 1.0  # which are shifted
    num_train = facts["scheduler"].get("num_train_timesteps", 1000)
    of_scheduler = _unipc if facts["scheduler"]["_class_name"] == "UniPCMultistepScheduler" else _euler
    return of_scheduler(steps, shift, num_train, given)


def _unipc(steps: int, shift: float, num_train: int, given: Sequence[float] | None) -> list[float]:
    levels = _linspace(1.0, 1 / num_train, steps + 1)[:-1] if given is None else given
    shifted = [shift * level / (1 + (shift - 1) * level) for level in levels]
    if abs(shifted[0] - 1) < _BELOW_ONE:
        shifted[0] -= _BELOW_ONE
    return [float(int(level * num_train)) for level in shifted]


def _euler(steps: int, shift: float, num_train: int, given: Sequence[float] | None) -> list[float]:
    if given is not None:  # an array of float32, also while it is shifted
        found = [
            float32(float32(float32(shift) * level) / float32(1 + float32(float32(shift - 1) * level)))
            for level in map(float32, given)
        ]
    else:
        # The scheduler shifts the lowest level when it is made, and again here.
        lowest = float32(1 / num_train)
        lowest = float32(float32(shift * lowest) / float32(1 + float32((shift - 1) * lowest)))
        evenly = [t / num_train for t in _linspace(float(num_train), lowest * num_train, steps)]
        found = [float32(shift * level / (1 + (shift - 1) * level)) for level in evenly]
    return [float32(level * num_train) for level in found]


def _linspace(start: float, stop: float, number: int) -> list[float]:
    """Return what numpy.linspace does."""
    if number == 1:
        return [start]
    step = (stop - start) / (number - 1)
    return [*(index * step + start for index in range(number - 1)), stop]
