"""Computes a video's timesteps and the expert of each step, as diffusers' schedulers do. Does not import torch.

Both schedulers of Wan sample the noise levels of flow matching: sigmas from 1 to 1/N (N = num_train_timesteps),
shifted towards noise by s: s sigma / (1 + (s - 1) sigma). A timestep is N sigma.
"""

import struct
from collections.abc import Mapping
from typing import Any

from svdq.pipeline.models.family import Segment

#: The schedulers whose state and timesteps svdq knows, and the name of the shift in the config of each.
SHIFT_SETTINGS = {"UniPCMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}
#: The experts: of the noisy steps and of the others.
HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"


def timesteps(steps: int, shift: float, scheduler: Mapping[str, Any]) -> list[float]:
    """Return the timesteps of a video, from the noisiest on, with the bits of diffusers' scheduler."""
    num = scheduler.get("num_train_timesteps", 1000)
    if scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler":
        return _flow_match_euler(steps, shift, num)
    sigmas = [_shifted(sigma, shift) for sigma in _linspace(1.0, 1 / num, steps + 1)[:-1]]
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6
    return [int(sigma * num) for sigma in sigmas]


def components(of_steps: list[float], boundary_timestep: float | None) -> list[str]:
    """Return the expert of each step; without a boundary there is only one."""
    # diffusers compares float32 tensors with the boundary.
    boundary = None if boundary_timestep is None else _float32(boundary_timestep)
    return [HIGH_NOISE if boundary is None or _float32(each) >= boundary else LOW_NOISE for each in of_steps]


def segments(of_steps: list[str]) -> tuple[Segment, ...]:
    """Join the steps of each expert, which are contiguous because timesteps fall."""
    names = list(dict.fromkeys(of_steps))
    stops = [len(of_steps) - of_steps[::-1].index(name) for name in names]
    starts = [0, *stops[:-1]]
    return tuple(
        Segment(component=name, start=start, stop=stop) for name, start, stop in zip(names, starts, stops, strict=True)
    )


def _flow_match_euler(steps: int, shift: float, num: int) -> list[float]:
    """Return timesteps like FlowMatchEulerDiscreteScheduler, which shifts twice and computes partly in float32."""
    low, high = (_shifted_in_float32(_float32(index / num), shift) for index in (1, num))
    sigmas = [_shifted(each / num, shift) for each in _linspace(high * num, low * num, steps)]
    return [_float32(_float32(sigma) * num) for sigma in sigmas]


def _linspace(start: float, stop: float, count: int) -> list[float]:
    """Return what numpy.linspace does."""
    if count == 1:
        return [start]
    step = (stop - start) / (count - 1)
    return [*(index * step + start for index in range(count - 1)), stop]


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _shifted_in_float32(sigma: float, shift: float) -> float:
    below = _float32(1 + _float32(_float32(shift - 1) * sigma))
    return _float32(_float32(_float32(shift) * sigma) / below)


def _float32(value: float) -> float:
    """Round to float32. A single sum, product or quotient of float32 values, rounded after double, is exact."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
