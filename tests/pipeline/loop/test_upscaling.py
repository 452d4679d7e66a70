"""Upscaling as a part of the last unit: what is delivered, cancellation, a stop in the middle, and failures."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from svdq.pipeline.loop.protocols import Request
from tests.pipeline.fakes import Alone, CountingModel, request


def upscaled(seed: int) -> Request:
    asked = request(seed)
    return replace(asked, parameters=asked.parameters.model_copy(update={"upscale": "2"}))


class Repeating:
    """An upscaler that repeats pixels; calls a function after the first frame."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile
        self.sizes: list[tuple[int, int]] = []

    def upscale(
        self, frames: torch.Tensor, size: tuple[int, int], is_canceled: Callable[[], bool]
    ) -> tuple[torch.Tensor, dict[str, Any]] | None:
        self.sizes.append(size)
        for _ in frames:
            if is_canceled():
                return None
            self.meanwhile()
        return frames.repeat_interleave(2, 1).repeat_interleave(2, 2), {"model": "repeating"}


def test_videos_that_ask_for_it_are_upscaled_and_keep_their_last_frame() -> None:
    upscaler = Repeating()
    group = Alone(CountingModel(), [request(1), upscaled(2)], upscaler=upscaler)
    group.stage.run()
    assert upscaler.sizes == [(128, 128)]
    assert group.sink.frames["job-1"].shape == (4, 64, 64, 3)
    assert group.sink.frames["job-2"].shape == (4, 128, 128, 3)
    plain, larger = (group.source.reports[job_id].body for job_id in ("job-1", "job-2"))
    assert (plain["upscaled"], larger["upscaled"]) == ({}, {"model": "repeating"})
    assert larger["seconds"].keys() - plain["seconds"].keys() == {"upscale"}
    assert group.sink.beside == {"job-1": {}, "job-2": {"last_frame": (64, 64, 3)}}
    assert len(group.stage.costs.measured()) == len(group.stage.costs.upscales()) == 1


def test_a_video_that_is_canceled_meanwhile_delivers_nothing() -> None:
    upscaler = Repeating()
    group = Alone(CountingModel(), [upscaled(1), request(2)], upscaler=upscaler)
    upscaler.meanwhile = lambda: group.monitor.cancel_at.update({"job-1": 0})
    group.stage.run()
    assert set(group.sink.frames) == {"job-2"}
    assert group.source.reports["job-1"].canceled


def test_a_stop_does_not_wait_for_the_last_frame() -> None:
    upscaler = Repeating()
    group = Alone(CountingModel(), [upscaled(1)], upscaler=upscaler)
    upscaler.meanwhile = group.stage.stop
    group.stage.run()
    assert (group.sink.frames, group.source.reports) == ({}, {}), "its job goes back to the queue"
    assert group.checkpointer.samples[-1].step == 5


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "Out of GPU memory while its frames were upscaled"),
        (ValueError("odd"), "ValueError while its frames were upscaled: odd"),
    ],
)
def test_a_failure_is_that_of_one_video(error: Exception, words: str) -> None:
    def fail() -> None:
        raise error

    group = Alone(CountingModel(), [upscaled(1), request(2)], upscaler=Repeating(fail))
    group.stage.run()
    assert set(group.sink.frames) == {"job-2"}
    assert words in str(group.source.reports["job-1"].failure)
