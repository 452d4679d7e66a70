"""Ranks in a chain give the bits of one rank; as real processes, they lose no step and do none twice."""

import os

import numpy as np
import pytest
import torch

from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.trace import steps_by_job
from svdq.worker.bench.loop_runs import Workload, run_loop
from tests.pipeline import ranks
from tests.pipeline.rendering import render

pytestmark = pytest.mark.slow


def test_preview_frames_do_not_depend_on_the_ranks(image) -> None:
    videos = [SvdParameters(seed=seed, steps=5, frames=4, width=64, height=64) for seed in (1, 2)]
    alone = open_model(resolve("preview"), Role.of_rank(0), torch.device("cpu"), torch.float32)
    for frames, video in zip(ranks.render("preview", image, videos, num_ranks=3), videos, strict=True):
        assert frames.std() > 5
        np.testing.assert_array_equal(frames, render(alone, image, video))


def test_the_simulated_model_checks_that_every_step_is_done_once_in_order() -> None:
    parameters = SvdParameters(seed=0, steps=9, frames=2, width=64, height=64)
    environment = dict(os.environ)
    logs = run_loop(Workload(models=(resolve("simulated:step_ms=10"),) * 4, parameters=parameters, bursts=(30,)))
    assert dict(os.environ) == environment, "processes that the caller starts later may find no modules"
    assert len(logs[-1].finished_s) == 30
    assert logs[0].failures == []
    assert {*steps_by_job(span for log in logs for span in log.spans).values()} == {9}
