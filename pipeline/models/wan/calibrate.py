"""Measures the curve of a model for `step_cache`, in one video, as diffusers' `MagCacheConfig(calibrate=True)` does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.models.wan.denoiser import Keep, WanDenoiser, instead_of_blocks
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.model import WanModel
from svdq.pipeline.planning.rounds import ENCODERS, TEXT_ENCODER


@torch.inference_mode()
def calibrate(
    model: WanModel, photo: Image, completed: WanParameters, on_step: Callable[[int], object]
) -> dict[str, list[float]]:
    """Denoise one video with a model in rounds; return the ratio of each step by component, the first of each 1."""
    model.hold(TEXT_ENCODER)
    state = model.embed(completed) or {}
    model.hold(ENCODERS)
    state |= model.encode(photo, completed)
    found = {}
    for segment in model.segments(completed):
        model.hold(segment.component)
        denoiser = _Calibrating(**vars(model.denoiser(state, completed)))
        for index in range(segment.start, segment.stop):
            state |= denoiser.step(state, index)
            on_step(index + 1)
        found[segment.component] = denoiser.ratios
    return found


@dataclass(kw_only=True)
class _Calibrating(WanDenoiser):
    """Computes every step, and compares the residuals of the prediction with the prompt."""

    ratios: list[float] = field(default_factory=list)

    @contextmanager
    def cached(self, transformer: Any, index: int, which: str) -> Iterator[None]:
        first, last = Keep(), Keep()
        with instead_of_blocks(transformer, [first, *transformer.blocks, last]):
            yield
        if which == "cond":
            residual = last.kept - first.kept
            before = self.residuals.get(which)
            self.ratios.append(1.0 if before is None else _ratio(residual, before))
            self.residuals[which] = residual


def _ratio(residual: Tensor, before: Tensor) -> float:
    """Return the mean over all tokens of the ratio of norms."""
    norms = (torch.linalg.norm(each.float(), dim=-1) for each in (residual, before))
    return float((next(norms) / (next(norms) + 1e-8)).mean())
