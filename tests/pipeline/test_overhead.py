"""A step of ours costs no more than one of diffusers' own loop, counted without noise."""

from pathlib import Path

import pytest

from svdq.pipeline.bench.overhead import measure
from svdq.pipeline.parameters import VideoParameters


@pytest.mark.parametrize("count", ["operations", "calls"])
def test_a_step_takes_no_more_than_one_of_diffusers(tiny_model: Path, count: str) -> None:
    parameters = VideoParameters(seed=1, steps=4, frames=2, width=64, height=64)
    pairs = measure(str(tiny_model), parameters, 1, count=count)
    assert pairs.all_equal
    assert len(pairs.ours) == len(pairs.theirs) == 3
    # Of ours the last one looks for NaN besides.
    assert 3000 < sum(pairs.ours) <= sum(pairs.theirs)
