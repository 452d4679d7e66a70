"""Chains of ranks with an untrained Wan: diffusers' bits for any binding, any plan and any rank that decodes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.planning.binding import Components, bounds_of
from svdq.pipeline.planning.planner import Planner
from svdq.worker.checkpoint.store import Codec
from tests.pipeline.fakes import Alone, Chain
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HIGH, LOW = frozenset({HIGH_NOISE}), frozenset({LOW_NOISE})
#: Guidance on and off, in one expert or both; other shapes, steps and shifts: so in some only one expert has steps.
VIDEOS = [
    {"steps": 6},
    {"steps": 4, "guidance_scale": 1.0, "frames": 1, "width": 96},
    {"steps": 3, "flow_shift": 0.05},
    {"steps": 2, "flow_shift": 50.0, "guidance_scale": 1.0, "guidance_scale_2": 4.0},
    {"steps": 1, "guidance_scale_2": 1.0},
]


@pytest.fixture(scope="module")
def opened(tiny_wan):
    """Open the model for a rank, once: a rank has its own VAE, which keeps what it has decoded."""

    @cache
    def open_for(rank: int, components: Components):
        role = replace(Role.of_rank(rank), components=components)
        return open_model(resolve(str(tiny_wan)), role, CPU, torch.float32)

    return open_for


@pytest.fixture(scope="module")
def videos(opened) -> list[WanParameters]:
    defaults = {"prompt": "A dog runs.", "frames": 5, "width": 64, "height": 64}
    open_ones = [WanParameters(seed=seed, **(defaults | changes)) for seed, changes in enumerate(VIDEOS)]
    return [opened(0, None).complete(each) for each in open_ones]


@pytest.fixture(scope="module")
def requests(videos, photo_bytes) -> list[Request]:
    return [
        Request(
            job_id=f"job-{video.seed}",
            parameters=video,
            photo=prepare_photo(photo_bytes, video.width, video.height),
            num_waiting=len(videos) - 1 - video.seed,
        )
        for video in videos
    ]


@pytest.fixture(scope="module")
def reference(tiny_wan, requests):
    return [diffusers_frames(tiny_wan, each.photo, each.parameters) for each in requests]


@st.composite
def bindings(draw: st.DrawFn) -> list[Components]:
    """Draw who has which expert: those of the first, those of both, and those of the second."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 5, 7]))
    start = draw(st.integers(0, num_ranks - 1))
    stop = draw(st.integers(max(start, 1), num_ranks))
    return [HIGH] * start + [None] * (stop - start) + [LOW] * (num_ranks - stop)


def plan(data: st.DataObject, bounds: list[tuple[int, int]]) -> tuple[int, ...]:
    """Draw boundaries within the units that each rank may do."""
    boundaries = [0]
    for (_, stop), (first, _) in pairwise(bounds):
        least = max(boundaries[-1], first)
        boundaries.append(data.draw(st.integers(least, max(least, stop))))
    boundaries.append(bounds[-1][1])
    return tuple(boundaries)


@given(st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_are_those_of_diffusers_for_any_plan(opened, requests, reference, data) -> None:
    components = data.draw(bindings())
    models = [opened(rank, held) for rank, held in enumerate(components)]
    every = range(len(components))
    bounds = [bounds_of(models[0].segments(each.parameters), components, every, every) for each in requests]
    assignments = [plan(data, each) for each in bounds]
    chain = Chain(models, requests, assignments)
    check(chain, requests, reference)


@pytest.mark.parametrize("components", [[HIGH, LOW], [HIGH, HIGH, None, LOW, LOW, LOW, LOW], [None] * 3])
def test_frames_are_those_of_diffusers_as_the_planner_decides(opened, requests, reference, components) -> None:
    models = [opened(rank, held) for rank, held in enumerate(components)]
    chain = Chain(models, requests, planner=Planner(len(models)), components=components)
    check(chain, requests, reference)


def check(chain: Chain, requests, reference) -> None:
    chain.run()
    for each, expected in zip(requests, reference, strict=True):
        assert chain.source.reports[each.job_id].failure is None
        np.testing.assert_array_equal(chain.sink.frames[each.job_id], expected)


@pytest.mark.parametrize("number", range(2))
def test_a_checkpoint_of_any_step_is_continued_by_bound_ranks(opened, requests, reference, number: int) -> None:
    asked, expected = requests[number], reference[number]
    whole = opened(0, None)
    codec = Codec(model="wan", device=CPU, compute=whole.info.compute)
    before = Alone(whole, [asked], keep_every_s=0.0)
    before.stage.run()
    kept = {sample.step: bytes(codec.encode(sample)) for sample in before.checkpointer.samples}
    assert sorted(kept) == list(range(asked.parameters.steps + 1))
    again = [
        replace(asked, job_id=f"from-{step}", resume=codec.decode(data, asked.job_id, asked.parameters))
        for step, data in kept.items()
    ]
    again = [replace(each, resume=replace(each.resume, job_id=each.job_id)) for each in again]
    components = [HIGH, LOW, LOW]
    models = [opened(rank, held) for rank, held in enumerate(components)]
    chain = Chain(models, again, planner=Planner(3), components=components)
    check(chain, again, [expected] * len(again))


def test_a_video_is_the_same_after_one_that_was_decoded_in_tiles(opened, videos, photo_bytes) -> None:
    photo = prepare_photo(photo_bytes, 320, 64)
    wide = videos[0].model_copy(update={"width": 320, "steps": 1})
    chunks = {"first": None, "tiled": 1, "again": None}
    jobs = [
        Request(job_id=name, parameters=wide.model_copy(update={"decode_chunk_size": chunk}), photo=photo)
        for name, chunk in chunks.items()
    ]
    rank = Alone(opened(0, None), jobs)
    rank.stage.run()
    frames = rank.sink.frames
    assert not np.array_equal(frames["first"], frames["tiled"])
    np.testing.assert_array_equal(frames["first"], frames["again"])


def test_a_step_that_runs_out_of_memory_is_done_again_with_the_same_bits(opened, requests, reference) -> None:
    model = opened(0, None)
    calls = []

    def runs_out(*_given) -> None:
        calls.append(1)
        # In the passes with guidance of the first step, of one with history, and of the second expert.
        if len(calls) in (2, 7, 13):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    experts = (model.pipeline.transformer, model.pipeline.transformer_2)
    hooks = [expert.proj_out.register_forward_hook(runs_out) for expert in experts]
    rank = Alone(model, requests[:1])
    rank.stage.run()
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2 * 6 + 2 + 1 + 2
    np.testing.assert_array_equal(rank.sink.frames["job-0"], reference[0])


def test_some_videos_have_steps_of_one_expert_only(opened, videos) -> None:
    """Otherwise the tests above would not see ranks that have nothing to do."""
    assert {len(opened(0, None).segments(video)) for video in videos} == {1, 2}
