"""The loop of a rank: every sample ends once, and one that fails harms no other."""

import pytest
import torch

from svdq.pipeline.errors import SampleError
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
    assert report.body["ticket"] == {"name": "photo-1"}
    assert report.body["parameters"]["decode_chunk_size"] == 4
    assert set(report.body["seconds"]) == {"encode", "decode"}
    assert [(rank, steps) for rank, steps, _ in report.body["stages"]] == [(0, 5)]


@pytest.mark.parametrize("where", ["fail_encode", "fail_step", "fail_decode"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SampleError("The photo is torn."), "The photo is torn."),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "Out of GPU memory"),
        (ValueError("an odd shape"), "ValueError"),
    ],
)
def test_a_sample_that_fails_anywhere_ends_with_a_sentence_and_its_neighbours_finish(where, error, words) -> None:
    model = CountingModel()
    getattr(model, where)[2] = error
    group = Alone(model, [request(1), request(2), request(3)])
    group.stage.run()
    assert set(group.sink.frames) == {"job-1", "job-3"}
    assert words in str(group.source.reports["job-2"].failure)
    assert group.source.reports["job-1"].failure is None
    assert group.source.reports["job-3"].failure is None


def test_nan_is_a_failure_that_names_the_steps() -> None:
    model = CountingModel()
    model.nan = {2}
    group = Alone(model, [request(1), request(2)])
    group.stage.run()
    assert set(group.sink.frames) == {"job-1"}
    assert "NaN or infinite in steps 1 to 5 of 5" in str(group.source.reports["job-2"].failure)


def test_large_but_finite_half_precision_latents_are_no_failure() -> None:
    class LargeModel(CountingModel):
        def encode(self, photo, parameters):
            return {"latents": torch.full((1, 4, 4, 64, 64), 60_000.0, dtype=torch.float16)}

        def denoiser(self, tensors, parameters):
            return self

        def step(self, latents, index):
            return latents

    group = Alone(LargeModel(), [request(1)])
    group.stage.run()
    assert group.source.reports["job-1"].failure is None


def test_a_decode_without_memory_is_tried_with_smaller_chunks_and_says_so() -> None:
    model = CountingModel()
    model.decodable_frames = 1
    group = Alone(model, [request(1, frames=5)])
    group.stage.run()
    assert model.chunk_sizes == [5, 3, 2, 1]
    assert group.source.reports["job-1"].body["parameters"]["decode_chunk_size"] == 1
    assert int(group.sink.frames["job-1"].max()) == 5, "nothing was denoised twice"


def test_a_sample_cancelled_in_mid_denoising_stops_at_the_next_step() -> None:
    group = Alone(CountingModel(), [request(1, steps=10), request(2)])
    group.monitor.cancel_at = {"job-1": 3}
    group.stage.run()
    assert group.source.reports["job-1"].cancelled
    assert max(index for job, index in group.monitor.steps if job == "job-1") == 3
    assert set(group.sink.frames) == {"job-2"}


def test_stop_leaves_after_the_step_that_is_being_done() -> None:
    group = Alone(CountingModel(), [request(1, steps=10), request(2)])
    group.monitor.step = lambda sample, index: group.stage.stop() if index == 4 else None  # type: ignore[method-assign]
    group.stage.run()
    assert group.stage.stopped
    assert group.sink.frames == {}
    assert group.source.reports == {}


def test_the_source_hears_early_that_rank_0_will_be_free() -> None:
    group = Alone(CountingModel(), [request(1), request(2)])
    group.stage.run()
    assert group.source.num_nearly_free == 2
