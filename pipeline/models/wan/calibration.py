"""Measures the curve by which steps of a model of Wan are skipped, as `svdq model calibrate` does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import MeasuredCurve
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.models.wan.denoiser import Keep, WanDenoiser, instead_of_blocks
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.model import WanModel
from svdq.pipeline.models.wan.step_cache import Curve
from svdq.pipeline.planning.rounds import ENCODERS, TEXT_ENCODER
from svdq.pipeline.video_parameters import VideoParameters

THRESHOLDS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2)


def calibrate(
    model: VideoModel, photo: Image, completed: VideoParameters, on_step: Callable[[int], object]
) -> MeasuredCurve:
    """Denoise one video with a model in rounds; see `Family.calibrate`. Raises InputError if an expert has no steps."""
    assert isinstance(model, WanModel)
    assert isinstance(completed, WanParameters)
    segments = model.segments(completed)
    names = {HIGH_NOISE: "high", LOW_NOISE: "low"} if model.info.facts["boundary_ratio"] else {HIGH_NOISE: "ratios"}
    if missing := sorted(names[each] for each in names.keys() - {segment.component for segment in segments}):
        raise InputError(f"The expert {missing[0]} has none of these {completed.steps} steps; give more.")
    found = _ratios(model, photo, completed, on_step)
    experts = [each.component for each in segments for _ in range(each.start, each.stop)]
    curve = Curve(ratios={each: tuple(ratios) for each, ratios in found.items()})
    return MeasuredCurve(
        table={names[each]: [round(ratio, 5) for ratio in ratios] for each, ratios in found.items()},
        computed={each: curve.skipped(experts, each).count(False) for each in THRESHOLDS},
        about=f"{completed.steps} steps, flow shift {completed.flow_shift:g}, {completed.width}x{completed.height}",
    )


@torch.inference_mode()
def _ratios(
    model: WanModel, photo: Image, completed: WanParameters, on_step: Callable[[int], object]
) -> dict[str, list[float]]:
    """Return the ratio of each step by component, the first of each 1."""
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
