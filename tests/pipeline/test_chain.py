"""Ranks in a chain of threads: any plan gives the same frames, what passes by overtakes, and nothing is lost."""

import threading
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import Timings
from svdq.pipeline.models.simulated import SimulatedModel
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.trace import steps_by_job
from tests.pipeline.fakes import CPU, Chain, CountingModel, ListSink, request
from tests.pipeline.rendering import diffusers_frames

WAIT_S = 60  # seconds after which a test gives up


class GatedModel(CountingModel):
    """Waits in the steps of one seed until the gate is opened."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.begun, self.gate = threading.Event(), threading.Event()

    def denoiser(self, tensors, parameters, step_costs=()):
        if parameters.seed == self.seed:
            self.begun.set()
            assert self.gate.wait(WAIT_S)
        return super().denoiser(tensors, parameters)


class GatedSink(ListSink):
    """Accepts nothing until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.came = threading.Event()

    def deliver(self, sample, frames, report):
        self.came.set()
        assert self.gate.wait(WAIT_S)
        super().deliver(sample, frames, report)

    def release(self):
        super().release()
        self.gate.set()


def whole(rank: int, num_ranks: int, steps: int = 5) -> tuple[int, ...]:
    """Have one rank do all of a sample."""
    return (0,) * (rank + 1) + (steps + 2,) * (num_ranks - rank)


def wait_for(condition, seconds: float = WAIT_S) -> bool:
    """Wait until a condition holds; false if it does not within so many seconds."""
    tick = threading.Event()
    for _ in range(int(seconds * 100)):
        if condition():
            return True
        tick.wait(0.01)
    return False


@st.composite
def plans(draw: st.DrawFn, num_ranks: int, steps: int) -> tuple[int, ...]:
    """Draw boundaries over the encode, the steps and the decode."""
    inner = sorted(draw(st.lists(st.integers(0, steps + 2), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return (0, *inner, steps + 2)


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[int, ...]]]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 7]))
    steps = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    return num_ranks, steps, [draw(plans(num_ranks, number)) for number in steps]


@given(chains())
@settings(max_examples=40, deadline=None)
def test_any_plan_is_followed_and_all_its_work_is_reported(drawn) -> None:
    num_ranks, steps, assignments = drawn
    models = [CountingModel() for _ in range(num_ranks)]
    requests = [request(seed, steps=number) for seed, number in enumerate(steps)]
    chain = Chain(models, requests, assignments)
    chain.run()
    for seed, number in enumerate(steps):
        assert int(chain.sink.frames[f"job-{seed}"].max()) == number
        report = chain.source.reports[f"job-{seed}"]
        assert (report.failure, report.body["index"]) == (None, seed)
    last_units = defaultdict(list)
    for rank, index, unit in chain.planner.work:
        last_units[rank, index].append(unit)
    for index, plan in enumerate(assignments):
        pieces = [(rank, *piece) for rank, piece in enumerate(pairwise(plan)) if piece[0] < piece[1]]
        for rank, start, stop in pieces:
            reported = last_units.pop((rank, index))
            assert reported == sorted(reported)
            assert reported[-1] == stop
            assert start > 0 or reported[0] == 1, "the encode is reported alone"
    assert not last_units
    assert sorted(chain.planner.ended_samples) == list(range(len(steps)))
    decodes = Counter(plan.index(steps[index] + 2) - 1 for index, plan in enumerate(assignments))
    assert [len(model.chunk_sizes) for model in models] == [decodes[rank] for rank in range(num_ranks)]


@given(
    st.sampled_from([1, 2, 3, 7]),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 6)),
    st.lists(st.integers(0, 6)),
)
@settings(max_examples=25, deadline=None)
def test_any_videos_are_made_as_the_planner_decides(
    num_ranks: int, steps: list[int], encoders: list[int], decoders: list[int]
) -> None:
    can_decode = tuple(sorted({num_ranks - 1, *(rank for rank in decoders if rank < num_ranks)}))
    can_encode = tuple(sorted({0, *(rank for rank in encoders if rank < num_ranks)}))
    requests = [
        replace(
            request(seed, steps=number), encoders=can_encode, decoders=can_decode, num_waiting=len(steps) - 1 - seed
        )
        for seed, number in enumerate(steps)
    ]
    models = [CountingModel() for _ in range(num_ranks)]
    chain = Chain(models, requests, planner=Planner(num_ranks))
    chain.run()
    for seed, number in enumerate(steps):
        assert int(chain.sink.frames[f"job-{seed}"].max()) == number
    for rank, model in enumerate(models):
        assert rank in can_decode or not model.chunk_sizes
        assert rank in can_encode or not model.num_encodes


VIDEOS = [
    SvdParameters(seed=21, steps=4, frames=3, width=64, height=64, fps=9, motion_bucket_id=60),
    SvdParameters(seed=22, steps=3, frames=2, width=64, height=64, max_guidance_scale=1.0, decode_chunk_size=1),
    SvdParameters(seed=23, steps=5, frames=4, width=64, height=64, noise_aug_strength=0.1, decode_chunk_size=3),
]


@pytest.fixture(scope="module")
def reference(tiny_model, image):
    return [diffusers_frames(tiny_model, image, parameters) for parameters in VIDEOS]


@pytest.fixture(scope="module")
def svd(tiny_model):
    return open_model(resolve(str(tiny_model)), Role.of_rank(0), CPU, torch.float32)


@pytest.fixture(scope="module")
def models(tiny_model):
    """A model for each rank: a model is used by one thread at a time."""
    resolved = resolve(str(tiny_model))
    return [open_model(resolved, Role.of_rank(0), CPU, torch.float32) for _ in range(7)]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_are_those_of_diffusers_for_any_plan(models, image, reference, data) -> None:
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 7]))
    assignments = [data.draw(plans(num_ranks, parameters.steps)) for parameters in VIDEOS]
    requests = [Request(job_id=f"job-{number}", parameters=video, photo=image) for number, video in enumerate(VIDEOS)]
    chain = Chain(models[:num_ranks], requests, assignments)
    chain.run()
    for number, expected in enumerate(reference):
        np.testing.assert_array_equal(chain.sink.frames[f"job-{number}"], expected)


def test_a_rank_0_that_only_encodes_has_no_unet(tiny_model, svd, image, reference) -> None:
    encoder = open_model(resolve(str(tiny_model)), Role(encode=True, components=frozenset()), CPU, torch.float32)
    assert encoder.pipeline.unet is None
    requests = [Request(job_id=f"job-{number}", parameters=video, photo=image) for number, video in enumerate(VIDEOS)]
    chain = Chain([encoder, svd, svd], requests, planner=Planner(3), components=[frozenset(), None, None])
    chain.run()
    for number, expected in enumerate(reference):
        np.testing.assert_array_equal(chain.sink.frames[f"job-{number}"], expected)


@pytest.mark.parametrize("decoder", [0, 1, 2])
def test_a_sample_whose_steps_are_done_is_decoded_by_any_rank(decoder: int) -> None:
    """As after a crash while it was decoded, or while its frames were on their way."""
    before = Chain([CountingModel()] * 3, [request(1)], [(0, 3, 7, 7)])
    before.run()
    [kept] = [sample for sample in before.checkpointers[1].samples if sample.step == 5]
    models = [CountingModel() for _ in range(3)]
    resumed = replace(request(1), resume=kept)
    after = Chain(models, [resumed], [(6,) * (decoder + 1) + (7,) * (3 - decoder)])
    after.run()
    np.testing.assert_array_equal(after.sink.frames["job-1"], before.sink.frames["job-1"])
    assert [len(model.chunk_sizes) for model in models] == [int(rank == decoder) for rank in range(3)]
    assert after.source.reports["job-1"].body["stages"] == before.source.reports["job-1"].body["stages"]


def test_what_has_no_work_on_a_busy_rank_overtakes() -> None:
    busy = GatedModel(seed=1)
    models = [CountingModel(), busy, CountingModel()]
    failing, whole_last, whole_first = request(2), request(3), request(4)
    models[2].fail_encode = {2: ValueError("no photo")}
    assignments = [whole(1, 3), whole(2, 3), whole(2, 3), whole(0, 3)]
    chain = Chain(models, [request(1), failing, whole_last, whole_first], assignments)
    chain.start()
    assert wait_for(lambda: len(chain.source.reports) == 3), "a failure, a sample and frames pass by"
    assert not busy.gate.is_set()
    assert set(chain.sink.frames) == {"job-3", "job-4"}
    assert (1, 0, 6) not in chain.planner.work
    assert {(2, 2, 7), (0, 3, 7)} <= set(chain.planner.work)
    busy.gate.set()
    chain.join()
    assert set(chain.sink.frames) == {"job-1", "job-3", "job-4"}


def test_rank_0_admits_videos_for_others_while_it_works() -> None:
    busy = GatedModel(seed=1)
    chain = Chain([busy, CountingModel()], [request(1), request(2)], [whole(0, 2), whole(1, 2)])
    chain.start()
    assert wait_for(lambda: "job-2" in chain.source.reports)
    assert "job-1" not in chain.source.reports
    busy.gate.set()
    chain.join()
    assert set(chain.sink.frames) == {"job-1", "job-2"}


def test_an_earlier_sample_interrupts_a_later_one_between_two_steps() -> None:
    first, second = GatedModel(seed=1), GatedModel(seed=2)
    chain = Chain([first, second], [request(1), request(2)], [(0, 3, 7), whole(1, 2)])
    chain.start()
    assert second.begun.wait(WAIT_S)
    first.gate.set()
    assert wait_for(lambda: chain.stages[1]._inbox.has_before(1))
    second.gate.set()
    chain.join()
    order = [job for job, _ in chain.monitors[1].steps]
    assert order.index("job-1") < len(order) - 1 - order[::-1].index("job-2")
    assert [int(frames.max()) for frames in chain.sink.frames.values()] == [5, 5]
    assert [*chain.sink.frames] == ["job-1", "job-2"]
    names = [span.name for span in chain.tracers[1].spans if span.job_id == "job-2" and "steps" in span.name]
    assert names == ["no steps", "steps 0-4"], "it was left for the other before its first step"
    assert steps_by_job(span for tracer in chain.tracers for span in tracer.spans) == {"job-1": 5, "job-2": 5}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_spans_count_each_step_of_a_video_once(cuts: list[list[int]]) -> None:
    plans = [(0, 1 + first, 1 + second, 7) for first, second in cuts]
    chain = Chain([CountingModel() for _ in range(3)], [request(seed) for seed in range(len(plans))], plans)
    chain.run()
    assert steps_by_job(span for tracer in chain.tracers for span in tracer.spans) == {
        f"job-{seed}": 5 for seed in range(len(plans))
    }


def test_the_segments_of_a_video_are_asked_for_once() -> None:
    class AskedModel(CountingModel):
        num_asked = 0

        def segments(self, parameters):
            self.num_asked += 1
            return super().segments(parameters)

    models = [AskedModel() for _ in range(3)]
    chain = Chain(models, [request(1), request(2)], [(0, 3, 5, 7), whole(1, 3)])
    chain.run()
    assert [model.num_asked for model in models] == [2, 0, 0]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_skipped_step_is_done_where_the_step_before_was(data: st.DataObject) -> None:
    """The model raises otherwise, and its decode if a step is missing."""
    costs = data.draw(st.lists(st.sampled_from("0015"), max_size=12))
    timings = Timings(step_ms=0.2, costs=(1.0, *map(float, costs)))
    num_ranks = data.draw(st.integers(1, 4))
    models = [SimulatedModel(timings, Role.of_rank(rank), CPU) for rank in range(num_ranks)]
    requests = [request(seed, steps=len(timings.costs)) for seed in range(8)]
    chain = Chain(models, requests, planner=Planner(num_ranks))
    chain.run()
    assert [chain.source.reports[each.job_id].failure for each in requests] == [None] * 8
    assert steps_by_job(span for tracer in chain.tracers for span in tracer.spans) == {
        each.job_id: len(timings.costs) for each in requests
    }


@pytest.mark.parametrize("decoder", [0, 1, 2])
def test_a_sink_that_accepts_nothing_stops_the_intake(decoder: int) -> None:
    sink = GatedSink()
    num_videos = 200
    requests = [request(seed, frames=8) for seed in range(num_videos)]
    plan = whole(0, 3) if decoder == 0 else (0,) + (6,) * decoder + (7,) * (3 - decoder)
    chain = Chain([CountingModel() for _ in range(3)], requests, [plan] * num_videos, sink)
    chain.start()
    assert sink.came.wait(WAIT_S)
    assert not wait_for(lambda: len(chain.source.taken) > num_videos // 2, 1.5)
    sink.gate.set()
    chain.join()
    assert len(sink.frames) == num_videos


def test_a_rank_that_stops_waits_for_no_sink_and_keeps_what_it_has() -> None:
    sink, busy = GatedSink(), GatedModel(seed=2)
    models = [CountingModel(), busy, CountingModel()]
    chain = Chain(models, [request(1), request(2), request(3)], [whole(0, 3), whole(1, 3), whole(1, 3)], sink)
    chain.start()
    assert sink.came.wait(WAIT_S)
    assert busy.begun.wait(WAIT_S)
    for stage in chain.stages:
        stage.stop()
    busy.gate.set()
    chain.join()
    assert chain.sink.released
    assert "job-3" not in chain.source.reports
    assert [sample.job_id for sample in chain.checkpointers[0].samples] == ["job-1"]


def test_a_sample_canceled_before_its_decode_on_an_inner_rank_is_reported() -> None:
    models = [CountingModel() for _ in range(3)]
    chain = Chain(models, [request(1), request(2)], [(0, 6, 7, 7)] * 2)
    chain.monitors[1].cancel_at = {"job-1": 0}
    chain.run()
    assert chain.source.reports["job-1"].canceled
    assert set(chain.sink.frames) == {"job-2"}
    assert len(models[1].chunk_sizes) == 1


def test_a_decode_that_fails_on_an_inner_rank_harms_no_other() -> None:
    models = [CountingModel() for _ in range(3)]
    models[1].fail_decode = {2: ValueError("an odd shape")}
    chain = Chain(models, [request(seed) for seed in (1, 2, 3)], [(0, 3, 7, 7)] * 3)
    chain.run()
    assert set(chain.sink.frames) == {"job-1", "job-3"}
    assert "ValueError while its frames were decoded" in str(chain.source.reports["job-2"].failure)
    assert chain.checkpointers[1].samples[1].step == 5, "its latents were kept"


def test_every_rank_warms_up_once_for_a_new_shape() -> None:
    models = [CountingModel() for _ in range(3)]
    chain = Chain(models, [request(1), request(2), request(3, frames=6)], [whole(rank, 3) for rank in (0, 1, 2)])
    chain.run()
    assert [[parameters.frames for parameters in model.warmed] for model in models] == [[], [4, 6], [4, 6]]
    assert [monitor.warmed for monitor in chain.monitors] == [[], ["job-1", "job-3"], ["job-1", "job-3"]]


def test_a_sample_has_work_where_it_has_units() -> None:
    sample = Sample(job_id="id", parameters=request(1).parameters, boundaries=(0, 0, 4, 6, 7), step=-1)
    assert [sample.has_work(rank) for rank in range(4)] == [False, True, True, True]
    assert [replace(sample, step=5).has_work(rank) for rank in range(4)] == [False, False, False, True]
    assert [sample.steps_of(rank) for rank in range(4)] == [(0, 0), (0, 3), (3, 5), (5, 5)]
    assert sample.decoder == 3
    assert not any(sample.failed("why").has_work(rank) for rank in range(4))
