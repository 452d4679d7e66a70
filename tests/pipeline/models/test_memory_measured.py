"""What videos were measured to take: by the parts that do the work, once for each shape, remembered, and put to use."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from svdq.pipeline.models.memory import MemoryEstimator, StorageMeter
from svdq.pipeline.models.memory_measured import WORKSPACE_BYTES, MeasuredMemory
from svdq.pipeline.models.memory_meter import MemoryMeter
from svdq.pipeline.models.memory_plan import DoesNotFitError, MemoryPlan, Room
from svdq.pipeline.models.memory_room import RESERVE_BYTES
from svdq.pipeline.models.model import ModelInfo, Part
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.parameters import VideoParameters
from svdq.worker.intake.memory import remembered

CPU = torch.device("cpu")
ALL = Part.ENCODER | Part.DENOISER | Part.DECODER
#: Bytes of what is small, such as a scheduler's tables, and is made before or after.
TABLES = 20_000
SMALL = VideoParameters(seed=1, frames=2, width=128, height=64, decode_chunk_size=1)


class StorageCounter:
    """Counts tensors on the processor, in place of PyTorch's allocator of a GPU."""

    def __init__(self) -> None:
        self.meter = StorageMeter(("cpu",))
        self.num_restarts = 0

    def restart(self) -> int:
        self.num_restarts += 1
        self.meter.peak = self.meter.live
        return self.meter.live

    def peak(self) -> int:
        return self.meter.peak


class Made:
    """Makes videos with a model that is measured."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counter = StorageCounter()
        monkeypatch.setattr(MemoryMeter, "of", lambda device: MemoryMeter(self.counter if device == CPU else None))
        self.model = SvdModel(str(folder), ALL, CPU, torch.float32)

    def make(self, parameters: VideoParameters) -> None:
        with torch.inference_mode(), self.counter.meter:
            photo = Image.new("RGB", (parameters.width, parameters.height))
            tensors = self.model.encode(photo, parameters)
            denoiser = self.model.denoiser(tensors, parameters)
            latents = denoiser.step(denoiser.step(tensors["latents"], 0), 1)
            self.model.decode({"latents": latents}, parameters, parameters.decode_chunk_size or 1)


def test_each_part_is_measured_once_for_each_shape(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tiny_model, monkeypatch)
    assert made.model.memory(SMALL) == {}
    made.make(SMALL)
    estimates = MemoryEstimator(str(tiny_model), torch.float32, "cpu", made.model._options)
    found = made.model.memory(SMALL)
    assert found == {
        "encode": pytest.approx(estimates.encode(ALL, 128, 64), abs=TABLES),
        "step": pytest.approx(estimates.step(128, 64, 2, True), abs=TABLES),
        "decode": pytest.approx(estimates.decode(128, 64, 2, 1), abs=TABLES),
    }
    made.make(SMALL.model_copy(update={"seed": 2}))
    assert made.counter.num_restarts == 3
    assert made.model.memory(SMALL) == found
    # What a part depends on, and nothing else, makes another shape of it.
    assert set(made.model.memory(SMALL.model_copy(update={"decode_chunk_size": 2}))) == {"encode", "step"}
    assert set(made.model.memory(SMALL.model_copy(update={"max_guidance_scale": 1.0}))) == {"encode", "decode"}
    assert set(made.model.memory(SMALL.model_copy(update={"frames": 3}))) == {"encode"}
    assert made.model.memory(SMALL.model_copy(update={"height": 128})) == {}


def test_what_ran_out_of_memory_was_not_measured() -> None:
    meter = MemoryMeter(StorageCounter())
    with pytest.raises(torch.OutOfMemoryError), meter.measuring("decode", (128, 64, 2, 1)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert meter.measured(SMALL) == {}


def test_a_processor_is_not_measured(tiny_model: Path) -> None:
    model = SvdModel(str(tiny_model), Part.DECODER, CPU, torch.float32)
    model.decode({"latents": torch.ones(1, 2, 4, 8, 16)}, SMALL, 1)
    assert model.memory(SMALL) == {}


# What is made of it.


def step_of(frames: int) -> int:
    return 100 * frames


def expected(measured: MeasuredMemory, frames: int) -> int:
    return measured.expected("step", (128, 64, frames, 2), lambda width, height, frames, batch: step_of(frames))


def video(frames: int) -> VideoParameters:
    return SMALL.model_copy(update={"frames": frames})


def test_a_measurement_goes_before_an_estimate_and_corrects_those_of_about_the_same_size() -> None:
    measured = MeasuredMemory(unseen=70)
    assert expected(measured, 40) == 4_070
    measured.learn(video(40), {"step": 4_030})
    assert expected(measured, 40) == 4_030
    assert expected(measured, 44) == 4_430
    # Not of any size: a small video says nothing about a large one.
    assert expected(measured, 90) == 9_070
    measured.learn(video(100), {"step": 10_500, "decode": 9})
    assert expected(measured, 90) == 9_500
    assert expected(measured, 300) == 30_500
    # The rank that needed most counts, whichever told last.
    measured.learn(video(40), {"step": 4_020})
    assert expected(measured, 40) == 4_030


def test_what_is_smaller_than_what_was_made_takes_no_more() -> None:
    measured = MeasuredMemory(unseen=70)
    measured.learn(video(9), {"step": 850})
    assert expected(measured, 9) == 850
    assert expected(measured, 8) == 800
    measured.learn(video(8), {"step": 840})
    assert expected(measured, 7) == 740
    assert [expected(measured, frames) for frames in (9, 10)] == [850, 1_000]
    measured.learn(video(10), {"step": 700})
    assert expected(measured, 7) == 700, "10 frames took no more"


def test_what_was_made_once_may_take_what_is_kept_free() -> None:
    measured = MeasuredMemory(unseen=70, slack=50)
    measured.learn(video(40), {"step": 4_030})
    assert expected(measured, 40) == 3_980
    assert expected(measured, 39) == 3_930
    assert expected(measured, 41) == 4_130


def test_a_decode_is_about_the_same_size_if_its_chunks_are() -> None:
    def decode(width: int, height: int, frames: int, chunk: int) -> int:
        return 100 * chunk

    measured = MeasuredMemory(unseen=70)
    measured.learn(SMALL.model_copy(update={"frames": 25, "decode_chunk_size": 8}), {"decode": 810})
    assert measured.expected("decode", (128, 64, 100, 8), decode) == 810
    assert measured.expected("decode", (128, 64, 25, 25), decode) == 2_570


def test_it_is_remembered_for_the_same_model_on_the_same_gpus(tmp_path: Path) -> None:
    def measured(device: str) -> MeasuredMemory:
        return MeasuredMemory(7, 0, tmp_path / "memory", {"model": "xt", "device": device})

    here, beside = measured("A5000"), measured("A5000")
    here.learn(video(4), {"step": 430})
    beside.learn(video(8), {"step": 900})
    assert (expected(measured("A5000"), 4), expected(measured("A5000"), 8)) == (430, 900)
    assert expected(measured("H100"), 4) == 407
    (path,) = (tmp_path / "memory").iterdir()
    assert json.loads(path.read_text())["device"] == "A5000"
    rows = ('["step", [128, 64, 4, 2], 0]', '["step", [128, 64, 4], 9]', '["step", [128, 64, 4, "2"], 9]', '["step"]')
    others = ('["move", [128, 64], 9]', '["step", [128, 64, 4, 2], Infinity]', '["step", [1, 1, 1, 1], null]', "7")
    for broken in ("", "{}", "[1]", *(f'{{"bytes": [{row}]}}' for row in (*rows, *others))):
        path.write_text(broken)
        assert expected(measured("A5000"), 4) == 407, broken
    measured("A5000").learn(video(4), {"step": 440})
    assert expected(measured("A5000"), 4) == 440


def test_a_home_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("no folder")
    measured = MeasuredMemory(7, 0, tmp_path / "memory")
    measured.learn(video(4), {"step": 430})
    assert expected(measured, 4) == 430


def test_groups_that_differ_in_what_decides_about_memory_remember_apart(tmp_path: Path) -> None:
    info = ModelInfo(name="xt", notice="", default_frames=25, compute={"dtype": "float16"})

    def facts(*devices: str, **more: int) -> list[str]:
        return [json.dumps({"device": device, **more}) for device in devices]

    a_pair = remembered(tmp_path, info, facts("A5000", "A5000"))
    a_pair.learn(video(4), {"step": 430})
    known = [
        expected(remembered(tmp_path, other_info, other_facts), 4)
        for other_info, other_facts in (
            (info, facts("A5000", "A5000", "A5000")),
            (info, facts("A5000")),
            (info, facts("A5000", "H100")),
            (replace(info, compute={"dtype": "bfloat16"}), facts("A5000", "A5000")),
            (info, facts("cpu", "cpu", limit=1_000)),
        )
    ]
    unknown = step_of(4) + WORKSPACE_BYTES
    assert known == [430 - RESERVE_BYTES, *[unknown] * 3, step_of(4)]


class InProportion:
    """Estimates that grow with frames alone."""

    def weights(self, encoder: bool, decoder: bool) -> int:
        return 1_000

    def encode(self, decoder: bool, width: int, height: int) -> int:
        return 10

    def step(self, width: int, height: int, frames: int, guided: bool, chunked: bool = False) -> int:
        return step_of(frames)

    def decode(self, width: int, height: int, frames: int, decode_chunk_size: int) -> int:
        return 10


def test_a_plan_learns_from_what_was_made() -> None:
    plan = MemoryPlan(2, [Room(capacity=2_000, ranks=(1,))], InProportion(), fit=False)
    plan.admit(video(10))
    plan.admit(video(9))
    plan.learn(video(8), {"step": 950, "encode": 10, "decode": 10})
    with pytest.raises(DoesNotFitError, match=": 8 frames would fit"):
        plan.admit(video(10))
    with pytest.raises(DoesNotFitError):
        plan.admit(video(9))
    plan.admit(video(8))
