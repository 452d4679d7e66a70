"""The schedules of ComfyUI for flow models: the noise level before each step. Does not import torch.

Each function is the schedule of that name in ComfyUI's comfy/samplers.py, for the `ModelSamplingDiscreteFlow` of its
comfy/model_sampling.py: 1000 levels t/1000, shifted. Arithmetic is in float32, as there.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

_NUM_LEVELS = 1000
_BETA = 0.6  # both parameters of the Beta distribution of `beta` (Lee et al. 2024, arXiv:2407.12173)
_THRESHOLD_NOISE = 0.025  # of `linear_quadratic`: how far its linear half goes


def sigmas_of(name: str, steps: int, shift: float) -> list[float]:
    """Return the noise level before each of some steps by ComfyUI's schedule, after the shift, from 1 down."""
    return [float(level) for level in SCHEDULES[name](steps, shift)]


def _shifted(levels: Any, shift: float) -> Any:
    """Return shift t / (1 + (shift - 1) t), which is `time_snr_shift`."""
    return levels if shift == 1 else shift * levels / (1 + (shift - 1) * levels)


def _table(shift: float) -> Any:
    """Return all levels of the model, rising: (1000,)."""
    levels = np.arange(1, _NUM_LEVELS + 1).astype(np.float32) / np.float32(_NUM_LEVELS)
    return _shifted(levels, shift)


def _simple(steps: int, shift: float) -> Any:
    """Return every (1000/steps)-th level."""
    table, stride = _table(shift), _NUM_LEVELS / steps
    return [table[-(1 + int(place * stride))] for place in range(steps)]


def _normal(steps: int, shift: float, *, last: bool = True) -> Any:
    """Return levels at equal distances, from the highest to the lowest, which counts with `last`.

    ComfyUI shifts them from 1 to the shifted lowest, so the lowest is shifted twice.
    """
    lowest = _table(shift)[0]
    if last and math.isclose(float(_shifted(lowest, shift)), 0, abs_tol=1e-5):
        return _shifted(np.linspace(1, lowest, steps + 1, dtype=np.float32), shift)[:-1]
    levels = np.linspace(1, lowest, steps if last else steps + 1, dtype=np.float32)
    return _shifted(levels if last else levels[:-1], shift)


def _sgm_uniform(steps: int, shift: float) -> Any:
    return _normal(steps, shift, last=False)


def _beta(steps: int, shift: float) -> Any:
    """Return the levels at quantiles of Beta(0.6, 0.6), which is dense at both ends.

    ComfyUI leaves out a level that comes twice, as with more than 150 steps; here it is a step of length 0.
    """
    quantiles = 1 - np.linspace(0, 1, steps, endpoint=False)
    # rint(ppf(q) * 999) is the number of half-way points up to the quantile, the median (499.5) among them.
    return _table(shift)[np.searchsorted(_cdf_between_levels(), quantiles, side="right")]


@cache
def _cdf_between_levels() -> Any:
    """Return the distribution function of Beta(0.6, 0.6) half-way between levels, 0.5/999 to 998.5/999: (999,).

    x^a / B(a, b) times the sum of (1 - b)_n x^n / (n! (a + n)), the power series of DLMF 8.17.7 and 15.2.1.
    """
    half = (np.arange(_NUM_LEVELS // 2) + 0.5) / (_NUM_LEVELS - 1)  # up to 1/2; the other half by symmetry
    total, factor = np.zeros_like(half), np.ones_like(half)
    for n in range(64):  # terms fall by half
        total += factor / (_BETA + n)
        factor *= half * (1 - _BETA + n) / (n + 1)
    found = half**_BETA * total * math.gamma(2 * _BETA) / math.gamma(_BETA) ** 2
    return np.concatenate([found[:-1], [0.5], 1 - found[-2::-1]])


def _linear_quadratic(steps: int, shift: float) -> Any:
    """Return a slow linear half and a quadratic one, which meet with equal slopes; the shift does not count."""
    if steps == 1:
        return [1.0]
    linear = steps // 2
    quadratic = steps - linear
    rest = linear - _THRESHOLD_NOISE * steps
    curve, slope = rest / (linear * quadratic**2), _THRESHOLD_NOISE / linear - 2 * rest / quadratic**2
    done = [place * _THRESHOLD_NOISE / linear for place in range(linear)]
    done += [curve * place**2 + slope * place + curve * linear**2 for place in range(linear, steps)]
    return np.array([1 - each for each in done], dtype=np.float32)


SCHEDULES: Mapping[str, Callable[[int, float], Any]] = {
    "simple": _simple,
    "normal": _normal,
    "sgm_uniform": _sgm_uniform,
    "beta": _beta,
    "linear_quadratic": _linear_quadratic,
}
