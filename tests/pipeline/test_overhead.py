"""A step of ours costs no more than one of diffusers' own loop, counted without noise."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from tests.pipeline.fakes import Alone, request
from tests.pipeline.references import call_diffusers
from tests.pipeline.rendering import pipeline_of

pytestmark = pytest.mark.slow

Meter = Callable[[], int]  # gives how much was counted so far


class Operations(TorchDispatchMode):
    """Counts torch's operations, which on a GPU are kernels to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:
            # In inference mode, which is ours, operations arrive whole that without it arrive in parts.
            parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        self.number += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[Meter]:
    with Operations() as found:
        yield lambda: found.number


@contextmanager
def calls() -> Iterator[Meter]:
    """Count the calls of functions that Python makes."""
    number = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield lambda: number
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("counting", [operations, calls])
def test_a_step_takes_no_more_than_one_of_diffusers(
    tiny_model: Path, counting: Callable[[], AbstractContextManager[Meter]]
) -> None:
    photo = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 90).convert("RGB")
    asked = replace(request(1, steps=8, frames=2), photo=photo)
    ours = SvdModel(resolve(str(tiny_model)), Role.of_rank(0), torch.device("cpu"), torch.float32)
    for _ in range(2):  # what is done once only is not counted
        with counting() as meter:
            marks_theirs, marks_ours = [], []
            # In our mode, too: operations are counted, and computed, in other parts outside of it.
            with torch.inference_mode():
                frames = call_diffusers(
                    pipeline_of(tiny_model),
                    photo,
                    asked.parameters,
                    callback_on_step_end=lambda *_, marks=marks_theirs, meter=meter: marks.append(meter()) or {},
                )[0]
            group = Alone(ours, [asked])
            group.monitor.step = lambda _sample, _index, marks=marks_ours, meter=meter: marks.append(meter())
            group.stage.run()
    np.testing.assert_array_equal(group.sink.frames["job-1"], np.stack([np.asarray(frame) for frame in frames]))
    # Each step but the first: theirs are noted after each step; ours at admission, before each step and at the decode.
    per_step_theirs = [end - start for start, end in itertools.pairwise(marks_theirs)]
    per_step_ours = [end - start for start, end in itertools.pairwise(marks_ours)][2:]
    assert len(per_step_theirs) == len(per_step_ours) == 7
    # Of ours the last one also looks for NaN, and reports the work to the plan.
    assert 7000 < sum(per_step_ours) <= sum(per_step_theirs)
