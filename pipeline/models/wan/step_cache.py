"""MagCache: which steps of a video are skipped, by a curve of the model, the number of steps and a threshold.

The residual of a step is what the blocks of a transformer add to their input. Its magnitude changes little from one
step to the next: a skipped step adds the last residual again. The curve has the ratio of each step's mean magnitude to
that of the step before; their product estimates the error (Z. Ma et al., "MagCache: Fast Video Generation with
Magnitude-Aware Cache", arXiv:2506.09045). The choice is that of diffusers' `MagCacheConfig`, in float32 as there. Does
not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.model_file import StepCacheEntry
from svdq.pipeline.models.sigmas import float32
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.toml_file import parse_toml

MAX_SKIP, RETENTION = 2, 0.2  # of the published use for image to video


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The ratios of a model by component, each of as many steps as it was measured with, and what limits skipping."""

    ratios: dict[str, tuple[float, ...]]
    max_skip: int = MAX_SKIP  # most successive steps that are skipped
    retention: float = RETENTION  # share of an expert's steps, the first ones, that are computed

    def skipped(self, experts: Sequence[str], threshold: float) -> list[bool]:
        """Return whether each step is skipped, by the expert of each; an expert begins anew with its first step."""
        return [
            each
            for expert, steps in groupby(experts)
            for each in _skipped(self.ratios[expert], len([*steps]), threshold, self.max_skip, self.retention)
        ]

    def threshold_for(self, experts: Sequence[str], speedup: float) -> float:
        """Return the smallest threshold, in steps of 0.01, that leaves at most 1/`speedup` of the steps.

        Raises InputError if none does.
        """
        for hundredths in range(1, 101):
            if self.skipped(experts, hundredths / 100).count(False) <= len(experts) / speedup:
                return hundredths / 100
        least = self.skipped(experts, 1.0).count(False)
        raise InputError(
            f"step_cache {speedup:g}x is more than there is: at least {least} of {len(experts)} steps are computed; "
            "give a smaller speedup, or a threshold such as 0.06."
        )


def _skipped(ratios: Sequence[float], num_steps: int, threshold: float, max_skip: int, retention: float) -> list[bool]:
    """Choose as diffusers' `MagCacheHeadHook` does."""
    ratios = [float32(each) for each in ratios]
    if len(ratios) != num_steps:
        ratios = _nearest(ratios, num_steps)
    num_kept = int(retention * num_steps + 0.5)
    found: list[bool] = []
    ratio, error, num_successive = 1.0, 0.0, 0
    for step in range(num_steps):
        is_skipped = False
        if step >= num_kept:
            ratio, num_successive = float32(ratio * ratios[step]), num_successive + 1
            error = float32(error + abs(float32(1.0 - ratio)))
            is_skipped = step > 0 and error <= float32(threshold) and num_successive <= max_skip
            if not is_skipped:
                ratio, error, num_successive = 1.0, 0.0, 0
        found.append(is_skipped)
    return found


def _nearest(ratios: Sequence[float], num_steps: int) -> list[float]:
    """Return the ratios brought to another number of steps, as diffusers' `nearest_interp` does."""
    if num_steps == 1:
        return [ratios[-1]]
    scale = float32((len(ratios) - 1) / (num_steps - 1))
    return [ratios[round(float32(step * scale))] for step in range(num_steps)]


@cache
def _published() -> dict[str, dict[str, list[float]]]:
    return parse_toml(Path(__file__).with_name("curves.toml").read_bytes())


def find_curve(name: str, facts: Facts) -> Curve | None:
    """Return the curve of a model file, else the published one of a `name`; None if there is neither."""
    given = facts.get("step_cache", {})
    ratios = {key: given[key] for key in ("ratios", "high", "low") if key in given} or _published().get(name)
    if ratios is None:
        return None
    component = {"ratios": HIGH_NOISE, "high": HIGH_NOISE, "low": LOW_NOISE}
    return Curve(
        ratios={component[key]: tuple(each) for key, each in ratios.items()},
        max_skip=given.get("max_skip", MAX_SKIP),
        retention=given.get("retention", RETENTION),
    )


def use_step_cache(facts: Facts, given: StepCacheEntry) -> Facts:
    """Return the facts that a model file's curve changes; raises InputError if it is not one of such a model."""
    has_experts = facts["boundary_ratio"] is not None
    if given.ratios if has_experts else given.high:
        raise InputError(
            "step_cache of a model with two experts needs high and low, and not ratios."
            if has_experts
            else "step_cache of a model with one transformer needs ratios, and not high and low."
        )
    return {"step_cache": given.model_dump(exclude_none=True)}
