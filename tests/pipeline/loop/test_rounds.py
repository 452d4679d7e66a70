"""A rank in rounds: loads of each set, bits, failures, cancellation, checkpoints and the end after a leg."""

import threading
from dataclasses import replace

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.rounds import DECODER, ENCODERS, TEXT_ENCODER, Outlook
from tests.pipeline.fakes import Alone, CountingModel, request
from tests.waiting import wait_until


class RoundsModel(CountingModel):
    """Two experts, and a text encoder for all prompts; notes what is loaded, and refuses what another set does."""

    sets = (TEXT_ENCODER, ENCODERS, "first", "second", DECODER)

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.unloadable = ""

    def hold(self, components: str) -> None:
        if components == self.unloadable:
            raise InputError(f"The {components} cannot be loaded.")
        self.loads.append(components)

    def segments(self, parameters):
        return (
            Segment(component="first", start=0, stop=2),
            Segment(component="second", start=2, stop=parameters.steps),
        )

    def embed(self, parameters):
        return {} if self.loads and self.loads[-1] == TEXT_ENCODER else None

    def encode(self, photo, parameters):
        assert self.loads[-1] == ENCODERS
        return super().encode(photo, parameters)

    def denoiser(self, tensors, parameters, step_costs=()):
        step = int(tensors["latents"].max())
        assert self.loads[-1] == ("first" if step < 2 else "second")
        return super().denoiser(tensors, parameters)

    def decode(self, tensors, parameters, decode_chunk_size):
        assert self.loads[-1] == DECODER
        return super().decode(tensors, parameters, decode_chunk_size)


def requests(number: int, **options) -> list[Request]:
    return [request(seed, **options) for seed in range(number)]


def make(model: CountingModel, wanted: list[Request]) -> Alone:
    alone = Alone(model, wanted)
    alone.stage.run()
    return alone


def test_each_set_is_loaded_once_a_round_and_every_step_is_done_once() -> None:
    model = RoundsModel()
    alone = make(model, requests(2))
    assert model.loads == list(model.sets)
    assert {job: int(frames.max()) for job, frames in alone.sink.frames.items()} == {"job-0": 5, "job-1": 5}
    assert [report.failure for report in alone.source.reports.values()] == [None, None]


def test_many_videos_of_different_steps_need_a_few_rounds() -> None:
    model = RoundsModel()
    wanted = [request(seed, steps=3 + seed % 4) for seed in range(20)]
    alone = make(model, wanted)
    assert [int(alone.sink.frames[each.job_id].max()) for each in wanted] == [each.parameters.steps for each in wanted]
    # The first round is small, and the next ones are not. On a busy machine a prompt may come after the others.
    assert model.loads.count("first") == model.loads.count("second") < 6


def test_a_failed_video_and_a_canceled_one_end_alone() -> None:
    model = RoundsModel()
    model.fail_step[0] = RuntimeError("broken")
    alone = Alone(model, requests(3))
    alone.monitor.cancel_at["job-1"] = 2
    alone.stage.run()
    reports = alone.source.reports
    assert "broken" in (reports["job-0"].failure or "")
    assert reports["job-1"].canceled
    assert int(alone.sink.frames["job-2"].max()) == 5


def test_a_canceled_video_does_not_wait_for_its_turn() -> None:
    model = RoundsModel()
    alone = Alone(model, requests(2))
    alone.monitor.canceled = lambda job_id: job_id == "job-1" and model.loads[-1:] == ["first"]
    alone.stage.run()
    assert alone.source.reports["job-1"].canceled
    assert {index for job_id, index in alone.monitor.steps if job_id == "job-1"} == {0}, "it was encoded"
    assert int(alone.sink.frames["job-0"].max()) == 5


def test_a_video_is_saved_after_each_leg_and_continues_from_there() -> None:
    model = RoundsModel()
    alone = make(model, requests(1))
    saved = [sample.step for sample in alone.checkpointer.samples]
    assert saved == [0, 2, 5]
    for sample in alone.checkpointer.samples:
        again = RoundsModel()
        resumed = Request(job_id="job-0", parameters=sample.parameters, photo=None, resume=sample)
        frames = make(again, [resumed]).sink.frames["job-0"]
        assert int(frames.max()) == 5
        assert again.loads == {0: ["first", "second", DECODER], 2: ["second", DECODER], 5: [DECODER]}[sample.step]


def test_the_outlook_has_times_once_costs_are_measured() -> None:
    alone = Alone(RoundsModel(), [replace(each, num_waiting=5) for each in requests(6)])
    seen = []

    def step(sample: Sample, index: int) -> None:
        seen.append((sample.job_id, index, alone.stage.outlook()))

    alone.monitor.step = step
    alone.stage.run()
    assert seen[0][2]["job-0"] == Outlook(components=TEXT_ENCODER, num_before=0, eta_s=None)
    [outlook] = [found[2] for found in seen if found[:2] == ("job-4", 2)]
    places = {job_id: (each.components, each.num_before) for job_id, each in sorted(outlook.items())}
    assert places == {"job-2": (DECODER, 0), "job-3": (DECODER, 1), "job-4": ("second", 0), "job-5": ("second", 1)}
    assert outlook["job-5"].eta_s > outlook["job-2"].eta_s > 0


def test_a_load_that_fails_ends_the_rank_and_no_video() -> None:
    model = RoundsModel()
    model.unloadable = "second"
    alone = Alone(model, requests(2))
    with pytest.raises(InputError, match="The second cannot be loaded"):
        alone.stage.run()
    assert alone.source.reports == {}


def test_the_end_after_a_leg_leaves_the_other_videos() -> None:
    model = RoundsModel()
    alone = Alone(model, requests(2))
    begun = threading.Event()

    def step(sample: Sample, index: int) -> None:
        if index == 1:
            alone.stage.end_after_leg()
            begun.set()

    alone.monitor.step = step
    # On a busy machine the second one may come later, and would then not be encoded before the first goes on.
    alone.monitor.loading = lambda components, expected_s: wait_until(lambda: len(alone.stage.outlook()) == 2)
    alone.stage.run()
    assert begun.is_set()
    assert model.loads[-1] == "first"
    assert [sample.step for sample in alone.checkpointer.samples] == [0, 0, 2], (
        "the leg is finished, and no other begun"
    )
    assert alone.source.reports == {}
