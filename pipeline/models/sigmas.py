"""The schedules of ComfyUI for flow models: the noise level before each step.

Each function is the schedule of that name in ComfyUI's comfy/samplers.py, for the `ModelSamplingDiscreteFlow` of its
comfy/model_sampling.py: 1000 levels t/1000, shifted. Arithmetic is in float32, as there. Does not import numpy, since
submitting needs the levels too.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache

_NUM_LEVELS = 1000
_BETA = 0.6  # both parameters of the Beta distribution of `beta` (Lee et al. 2024, arXiv:2407.12173)
_THRESHOLD_NOISE = 0.025  # of `linear_quadratic`: how far its linear half goes


def sigmas_of(name: str, steps: int, shift: float) -> list[float]:
    """Return the noise level before each of some steps by ComfyUI's schedule, after the shift, from 1 down."""
    return list(SCHEDULES[name](steps, shift))


def float32(value: float) -> float:
    """Return the nearest number in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _shifted(level: float, shift: float) -> float:
    """Return shift t / (1 + (shift - 1) t), which is `time_snr_shift`."""
    if shift == 1:
        return level
    return float32(float32(float32(shift) * level) / float32(1 + float32(float32(shift - 1) * level)))


def _level(t: int, shift: float) -> float:
    """Return a level of the model, of which there are 1 to 1000, rising."""
    return _shifted(float32(t / _NUM_LEVELS), shift)


def _simple(steps: int, shift: float) -> Sequence[float]:
    """Return every (1000/steps)-th level."""
    stride = _NUM_LEVELS / steps
    return [_level(_NUM_LEVELS - int(place * stride), shift) for place in range(steps)]


def _normal(steps: int, shift: float, *, last: bool = True) -> Sequence[float]:
    """Return levels at equal distances, from the highest to the lowest, which counts with `last`.

    ComfyUI shifts them from 1 to the shifted lowest, so the lowest is shifted twice.
    """
    lowest = _level(1, shift)
    is_zero = math.isclose(_shifted(lowest, shift), 0, abs_tol=1e-5)
    num_gaps = steps - 1 if last and not is_zero else steps
    distance = float32(float32(lowest - 1) / max(1, num_gaps))
    even = [float32(1 + float32(place * distance)) for place in range(num_gaps)] + [lowest if num_gaps else 1.0]
    return [_shifted(level, shift) for level in even[:steps]]


def _sgm_uniform(steps: int, shift: float) -> Sequence[float]:
    return _normal(steps, shift, last=False)


def _beta(steps: int, shift: float) -> Sequence[float]:
    """Return the levels at quantiles of Beta(0.6, 0.6), which is dense at both ends.

    ComfyUI leaves out a level that comes twice, as with more than 150 steps; here it is a step of length 0.
    """
    # rint(ppf(q) * 999) is the number of half-way points up to the quantile, the median (499.5) among them.
    cdf = _cdf_between_levels()
    return [_level(1 + bisect_right(cdf, 1 - place * (1 / steps)), shift) for place in range(steps)]


@cache
def _cdf_between_levels() -> Sequence[float]:
    """Return the distribution function of Beta(0.6, 0.6) half-way between levels, 0.5/999 to 998.5/999: 999 values.

    x^a / B(a, b) times the sum of (1 - b)_n x^n / (n! (a + n)), the power series of DLMF 8.17.7 and 15.2.1.
    """

    def below(x: float) -> float:
        total, factor = 0.0, 1.0
        for n in range(64):  # terms fall by half
            total += factor / (_BETA + n)
            factor *= x * (1 - _BETA + n) / (n + 1)
        return math.pow(x, _BETA) * total * math.gamma(2 * _BETA) / math.gamma(_BETA) ** 2

    half = [below((place + 0.5) / (_NUM_LEVELS - 1)) for place in range(_NUM_LEVELS // 2 - 1)]
    return [*half, 0.5, *(1 - each for each in reversed(half))]  # up to 1/2; the other half by symmetry


def _linear_quadratic(steps: int, shift: float) -> Sequence[float]:
    """Return a slow linear half and a quadratic one, which meet with equal slopes; the shift does not count."""
    if steps == 1:
        return [1.0]
    linear = steps // 2
    quadratic = steps - linear
    rest = linear - _THRESHOLD_NOISE * steps
    curve, slope = rest / (linear * quadratic**2), _THRESHOLD_NOISE / linear - 2 * rest / quadratic**2
    done = [place * _THRESHOLD_NOISE / linear for place in range(linear)]
    done += [curve * place**2 + slope * place + curve * linear**2 for place in range(linear, steps)]
    return [float32(1 - each) for each in done]


SCHEDULES: Mapping[str, Callable[[int, float], Sequence[float]]] = {
    "simple": _simple,
    "normal": _normal,
    "sgm_uniform": _sgm_uniform,
    "beta": _beta,
    "linear_quadratic": _linear_quadratic,
}
