"""The loop of a rank: every sample ends once, and one that fails harms no other."""

import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from svdq.pipeline.errors import SampleError
from svdq.pipeline.loop import work
from svdq.pipeline.loop.sample import Resumption, Sample
from svdq.pipeline.models.resolved_model import Timings
from svdq.pipeline.models.simulated import SimulatedModel
from svdq.pipeline.models.video_model import Role
from tests.pipeline.fakes import Alone, CountingModel, request


def test_every_step_is_done_once_and_in_order() -> None:
    group = Alone(CountingModel(), [request(1, steps=5), request(2, steps=3)])
    group.stage.run()
    assert int(group.sink.frames["job-1"].max()) == 5
    assert int(group.sink.frames["job-2"].max()) == 3
    assert group.sink.closed
    assert [index for job, index in group.monitor.steps if job == "job-2"] == [0, 0, 1, 2, 3]  # encode, steps, decode


def test_reports_carry_what_a_job_needs() -> None:
    group = Alone(CountingModel(), [request(1)])
    group.stage.run()
    report = group.source.reports["job-1"]
    assert report.failure is None
    assert report.result == {"written": True}
    assert report.body["job"] == {"name": "photo-1"}
    assert report.body["parameters"]["decode_chunk_size"] == 4
    assert set(report.body["seconds"]) == {"encode", "decode"}
    assert [(rank, steps) for rank, steps, _ in report.body["stages"]] == [(0, 5)]


def test_reports_carry_the_memory_that_was_measured_in_this_life() -> None:
    """Another life may have measured on another kind of GPU."""
    model = CountingModel()
    model.taken = {"encode": 5, "step": 30}
    asked = request(1)
    half_done = Sample(
        job_id="job-1",
        parameters=asked.parameters,
        boundaries=(0, 7),
        step=2,
        tensors={"latents": torch.full((1, 4, 4, 8, 8), 2.0), "image_latents": torch.ones(1, 4, 8, 8)},
        memory={"step": 40, "decode": 7},
    )
    group = Alone(model, [replace(asked, resume=half_done), request(2)])
    group.stage.run()
    for report in group.source.reports.values():
        assert report.body["memory"] == {"encode": 5, "step": 30}


def test_a_decode_in_smaller_chunks_than_planned_tells_of_these_alone() -> None:
    class MeasuredModel(CountingModel):
        def memory(self, parameters):
            return {"step": 30, "decode": 100 * parameters.decode_chunk_size} if parameters.decode_chunk_size else {}

    model = MeasuredModel()
    model.decodable_frames = 2
    asked = request(1, frames=4)
    planned = asked.parameters.model_copy(update={"decode_chunk_size": 4})
    group = Alone(model, [replace(asked, parameters=planned)])
    group.stage.run()
    assert group.source.reports["job-1"].body["memory"] == {"step": 30, "decode": 200}


@pytest.mark.parametrize("where", ["fail_encode", "fail_step", "fail_decode"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SampleError("The photo is torn."), "The photo is torn."),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "Out of GPU memory"),
        (ValueError("an odd shape"), "ValueError"),
    ],
)
def test_a_sample_that_fails_ends_with_a_sentence_and_others_finish(where, error, words) -> None:
    model = CountingModel()
    getattr(model, where)[2] = error
    group = Alone(model, [request(1), request(2), request(3)])
    group.stage.run()
    assert set(group.sink.frames) == {"job-1", "job-3"}
    assert words in str(group.source.reports["job-2"].failure)
    assert group.source.reports["job-1"].failure is None
    assert group.source.reports["job-3"].failure is None


@pytest.mark.parametrize("index", [0, 2, 4])
def test_nan_is_a_failure_of_one_sample(index: int) -> None:
    model = CountingModel()
    model.nan = {2: index}
    group = Alone(model, [request(1), request(2), request(3)])
    group.stage.run()
    assert set(group.sink.frames) == {"job-1", "job-3"}
    assert "NaN or infinite by step 5 of 5" in str(group.source.reports["job-2"].failure)


def test_large_but_finite_half_precision_latents_are_no_failure() -> None:
    class LargeModel(CountingModel):
        def encode(self, photo, parameters):
            return {"latents": torch.full((1, 4, 4, 64, 64), 60_000.0, dtype=torch.float16)}

        def denoiser(self, tensors, parameters, step_costs=()):
            return self

        def step(self, state, index):
            return {"latents": state["latents"]}

    group = Alone(LargeModel(), [request(1)])
    group.stage.run()
    assert group.source.reports["job-1"].failure is None


@pytest.mark.parametrize(
    ("where", "times", "succeeds"),
    [("encode", 1, True), ("encode", 2, False), ("step", 1, True), ("step", 2, False), ("decode", 1, True)],
)
def test_work_that_runs_out_of_memory_frees_it_and_is_tried_once_more(where, times, succeeds) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def out_of_memory() -> None:
        assert [each() for each in held] == [None] * len(held)
        if len(held) < times:
            half_made = torch.zeros(3)
            held.append(weakref.ref(half_made))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    class SmallModel(CountingModel):
        def encode(self, photo, parameters):
            if where == "encode" and parameters.seed == 2:
                out_of_memory()
            return super().encode(photo, parameters)

        def denoiser(self, tensors, parameters, step_costs=()):
            found = super().denoiser(tensors, parameters)
            step = found.step

            def sometimes(state, index):
                if where == "step" and (parameters.seed, index) == (2, 3):
                    out_of_memory()
                return step(state, index)

            found.step = sometimes  # type: ignore[method-assign]
            return found

        def decode(self, tensors, parameters, decode_chunk_size):
            if where == "decode" and parameters.seed == 2:
                out_of_memory()
            return super().decode(tensors, parameters, decode_chunk_size)

    group = Alone(SmallModel(), [request(1), request(2), request(3)])
    group.stage.run()
    assert set(group.sink.frames) == {"job-1", "job-3", *["job-2"] * succeeds}
    assert len(held) == times
    if succeeds:
        assert int(group.sink.frames["job-2"].max()) == 5
    else:
        assert "Out of GPU memory" in str(group.source.reports["job-2"].failure)


@pytest.mark.parametrize("where", ["encode", "step", "decode"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_video_whose_memory_another_program_took_is_not_reported(where: str, is_taken: bool) -> None:
    """The rank waits until it is stopped; its jobs return to the queue, and go on from their checkpoints."""
    model = CountingModel()
    error = torch.OutOfMemoryError("CUDA out of memory.")
    {"encode": model.fail_encode, "step": model.fail_step, "decode": model.fail_decode}[where][2] = error
    asked = 0

    def gives_way(group: Alone) -> bool:
        nonlocal asked
        asked += 1
        if is_taken:
            threading.Timer(0.2, group.stage.stop).start()
        return is_taken

    group = Alone(model, [request(1), request(2), request(3)], gives_way=gives_way)
    group.stage.run()
    assert asked == 1
    assert group.source.reports.keys() == ({"job-1"} if is_taken else {"job-1", "job-2", "job-3"})
    if not is_taken:
        assert "Out of GPU memory" in str(group.source.reports["job-2"].failure)


def test_a_decode_without_memory_is_tried_with_smaller_chunks_and_says_so() -> None:
    model = CountingModel()
    model.decodable_frames = 1
    group = Alone(model, [request(1, frames=5)])
    group.stage.run()
    assert model.chunk_sizes == [5, 3, 2, 1]
    assert group.source.reports["job-1"].body["parameters"]["decode_chunk_size"] == 1
    assert int(group.sink.frames["job-1"].max()) == 5, "nothing was denoised twice"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "Out of GPU memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "Out of GPU"),
        (MemoryError(), "Out of memory"),
    ],
)
def test_any_error_of_memory_is_tried_with_smaller_chunks_and_explained(error, words) -> None:
    model = CountingModel()
    model.out_of_memory, model.decodable_frames = error, 2
    group = Alone(model, [request(1)])
    group.stage.run()
    assert model.chunk_sizes == [4, 2]
    assert group.source.reports["job-1"].failure is None
    model.decodable_frames = 0
    group = Alone(model, [request(1)])
    group.stage.run()
    failure = str(group.source.reports["job-1"].failure)
    assert failure.startswith(f"{words} ")
    assert "while one frame at a time was decoded; try fewer frames" in failure


def test_a_chunk_size_that_ran_out_of_memory_is_not_tried_again() -> None:
    model = CountingModel()
    model.decodable_frames = 1
    group = Alone(model, [request(1), request(2), request(3, frames=2)])
    group.stage.run()
    assert model.chunk_sizes == [4, 2, 1, 1, 2, 1]
    assert {report.body["parameters"]["decode_chunk_size"] for report in group.source.reports.values()} == {1}


def test_a_chunk_size_of_the_job_is_tried_after_it_ran_out_of_memory() -> None:
    model = CountingModel()
    model.decodable_frames = 2
    asked = request(2)
    named = replace(asked, parameters=asked.parameters.model_copy(update={"decode_chunk_size": 4}))
    chosen = replace(named, job_id="job-3", chunk_chosen=True)
    group = Alone(model, [request(1), named, chosen])
    group.stage.run()
    assert model.chunk_sizes == [4, 2, 4, 2, 2]


def test_a_warm_up_without_memory_ends_no_rank(caplog: pytest.LogCaptureFixture) -> None:
    model = CountingModel()
    model.decodable_frames = 3
    group = Alone(model, [request(1, frames=5)])
    group.stage.warm_up(request(1, frames=5).parameters)
    group.stage.run()
    assert len(model.warmed) == 1
    assert "Out of GPU memory while this rank warmed up for 64x64x5" in caplog.text
    assert group.source.reports["job-1"].body["parameters"]["decode_chunk_size"] == 3


def test_a_sample_canceled_in_mid_denoising_stops_at_the_next_step() -> None:
    group = Alone(CountingModel(), [request(1, steps=10), request(2)])
    group.monitor.cancel_at = {"job-1": 3}
    group.stage.run()
    assert group.source.reports["job-1"].canceled
    assert max(index for job, index in group.monitor.steps if job == "job-1") == 3
    assert set(group.sink.frames) == {"job-2"}


def test_stop_leaves_after_the_present_step_and_keeps_its_sample() -> None:
    group = Alone(CountingModel(), [request(1, steps=10), request(2)])
    group.monitor.step = lambda sample, index: group.stage.stop() if index == 4 else None  # type: ignore[method-assign]
    group.stage.run()
    assert group.stage.stopped
    assert group.sink.released
    assert group.sink.frames == {}
    assert group.source.reports == {}
    kept = group.checkpointer.samples[-1]
    assert (kept.job_id, kept.step, int(kept.tensors["latents"].max())) == ("job-1", 5, 5)


def test_a_sample_is_kept_when_it_is_denoised_and_before_it_is_decoded() -> None:
    group = Alone(CountingModel(), [request(1), request(2)])
    group.stage.run()
    assert [(sample.job_id, sample.step) for sample in group.checkpointer.samples] == [("job-1", 5), ("job-2", 5)]
    assert [int(sample.tensors["latents"].max()) for sample in group.checkpointer.samples] == [5, 5]


def test_a_sample_is_kept_between_steps_when_a_stage_takes_long() -> None:
    class InPlaceModel(CountingModel):
        def denoiser(self, tensors, parameters, step_costs=()):
            return self

        def step(self, state, index):
            return {"latents": state["latents"].add_(1)}

    group = Alone(InPlaceModel(), [request(1)], keep_every_s=0.0)
    group.stage.run()
    assert [sample.step for sample in group.checkpointer.samples] == [0, 1, 2, 3, 4, 5]
    # Each as it was, whatever the steps after it did to their latents.
    assert [int(sample.tensors["latents"].max()) for sample in group.checkpointer.samples[1:]] == [1, 2, 3, 4, 5]
    assert [sum(steps for _, steps, _ in sample.stages) for sample in group.checkpointer.samples] == [0, 1, 2, 3, 4, 5]


def test_a_sample_is_kept_between_steps_that_are_long(monkeypatch) -> None:
    monkeypatch.setattr(work, "LONG_STEP_S", 0.03)
    for step_ms, kept in ((50, [1, 2, 3, 4, 5]), (1, [5])):
        model = SimulatedModel(Timings(step_ms=step_ms), Role.of_rank(0), torch.device("cpu"))
        group = Alone(model, [request(1)])
        group.stage.run()
        assert [sample.step for sample in group.checkpointer.samples] == kept


def test_a_sample_is_kept_before_computed_steps_only() -> None:
    model = SimulatedModel(Timings(step_ms=0, costs=(1, 0, 0, 1, 0)), Role.of_rank(0), torch.device("cpu"))
    group = Alone(model, [request(1, steps=5)], keep_every_s=0.0)
    group.stage.run()
    assert [sample.step for sample in group.checkpointer.samples] == [0, 3, 5]
    assert group.source.reports["job-1"].failure is None


@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_kept_sample_is_resumed_and_no_step_is_done_twice(step: int) -> None:
    before = Alone(CountingModel(), [request(1)], keep_every_s=0.0)
    before.stage.run()
    kept = next(sample for sample in before.checkpointer.samples if sample.step == step)
    resumption = Resumption(from_step=step, steps_done_again=2)

    class NoEncoder(CountingModel):
        def encode(self, photo, parameters):
            raise AssertionError("the photo was encoded when the video was begun")

    resume = replace(kept, resumed=(resumption,))
    after = Alone(NoEncoder(), [replace(request(1), resume=resume, job={"name": "now"})])
    after.stage.run()
    report = after.source.reports["job-1"]
    assert report.failure is None
    np.testing.assert_array_equal(after.sink.frames["job-1"], before.sink.frames["job-1"])
    assert [index for _, index in after.monitor.steps] == [*range(step, 6)]  # steps, decode
    assert report.body["resumed"] == [{"from_step": step, "steps_done_again": 2}]
    assert report.body["job"] == {"name": "now"}
    assert sum(steps for _, steps, _ in report.body["stages"]) == 5
