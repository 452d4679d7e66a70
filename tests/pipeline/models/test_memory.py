"""What videos are estimated and measured to take, and the chunk sizes that ran out of memory."""

import json
from pathlib import Path

import pytest
import torch

from svdq.pipeline.models.base import Role
from svdq.pipeline.models.memory import ChunkLimits, MeasuredMemory, shape_for
from svdq.pipeline.models.options import ComputeOptions
from svdq.pipeline.models.svd.family import memory
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.models.wan.family import PUBLISHED
from svdq.pipeline.models.wan.family import memory as wan_memory

SMALL = SvdParameters(seed=1, frames=2, width=128, height=64, decode_chunk_size=1)


def estimate(activity, shape, dtype: str, *, has_decoder: bool = False) -> int:
    return memory(activity, shape, dtype, {}, has_decoder=has_decoder)


def gigabytes(activity, size: tuple[int, int], frames: int, *, chunk: int = 1, guided: bool = True) -> float:
    parameters = SvdParameters(
        seed=1,
        width=size[0],
        height=size[1],
        frames=frames,
        decode_chunk_size=chunk,
        max_guidance_scale=3.0 if guided else 1.0,
    )
    return estimate(activity, shape_for(activity, parameters), "float16") / 1e9


@pytest.mark.parametrize(
    ("size", "frames", "step", "all_at_once", "eight", "one", "encode"),
    [
        ((1024, 576), 25, 8.31, 42.28, 13.61, 1.82, 2.28),
        ((1024, 576), 14, 4.67, 23.67, 13.54, 1.76, 2.28),
        ((768, 448), 25, 4.85, 24.67, 7.94, 1.06, 1.39),
        ((576, 320), 25, 2.60, 13.22, 4.26, 0.57, 0.80),
        ((1920, 1088), 25, 29.43, 149.76, 48.22, 6.43, 7.69),
    ],
)
def test_estimates_are_those_of_the_table_in_the_documentation(
    size, frames, step, all_at_once, eight, one, encode
) -> None:
    """Taken from the published model, run on tensors without contents; those of its VAE times 1.4."""
    assert gigabytes("step", size, frames) == pytest.approx(step, rel=0.01)
    assert gigabytes("decode", size, frames, chunk=frames) == pytest.approx(all_at_once, rel=0.005)
    assert gigabytes("decode", size, frames, chunk=8) == pytest.approx(eight, rel=0.005)
    assert gigabytes("decode", size, frames, chunk=1) == pytest.approx(one, rel=0.01, abs=0.005)
    assert gigabytes("encode", size, frames) == pytest.approx(encode, rel=0.02, abs=0.005)


@pytest.mark.parametrize(
    ("size", "frames", "step", "decode", "encode"),
    [
        ((832, 480), 81, 3.74, 11.44, 8.99),
        ((1280, 720), 81, 8.61, 26.38, 20.75),
        ((832, 480), 41, 1.97, 11.16, 8.99),
        ((640, 352), 49, 1.32, 6.33, 5.07),
    ],
)
def test_estimates_of_wan_are_those_of_the_table_in_the_documentation(size, frames, step, decode, encode) -> None:
    """Counted on the published modules of I2V-A14B, run on tensors without contents; those of the VAE times 1.4."""

    def gigabytes(activity, shape) -> float:
        return wan_memory(activity, shape, "bfloat16", PUBLISHED, has_decoder=False) / 1e9

    assert gigabytes("step", (*size, frames, 2)) == pytest.approx(step, rel=0.02)
    assert gigabytes("decode", (*size, frames, frames)) == pytest.approx(decode, rel=0.01)
    assert gigabytes("encode", size) == pytest.approx(encode, rel=0.01)


def test_guidance_dtype_and_a_decoder_beside_the_encoder_count() -> None:
    assert gigabytes("step", (1024, 576), 25, guided=False) == pytest.approx(3.99, rel=0.01)
    step, size = (1024, 576, 25, 2), (1024, 576)
    assert estimate("step", step, "float32") == 2 * estimate("step", step, "bfloat16")
    assert estimate("step", step, "bfloat16") == estimate("step", step, "float16")
    # The VAE overflows in float16 alone.
    assert estimate("encode", size, "bfloat16") == pytest.approx(1.08e9, rel=0.01)
    decoder = estimate("encode", size, "float16", has_decoder=True) - estimate("encode", size, "float16")
    assert decoder == pytest.approx(2 * 0.127e9, rel=0.01)


@pytest.mark.parametrize("role", [Role(), Role(decode=True), Role(encode=True)])
def test_a_model_says_the_bytes_of_its_weights(tiny_model: Path, role: Role) -> None:
    model = SvdModel(str(tiny_model), role, torch.device("cpu"), torch.float32)
    files = sum(file.stat().st_size for file in tiny_model.glob("unet/*.safetensors"))
    if role == Role():
        assert model.info.weight_bytes == pytest.approx(files, rel=0.02)  # the files have headers
    else:
        assert model.info.weight_bytes > files


def test_weights_in_int8_count_as_they_are_kept(tiny_model: Path) -> None:
    pytest.importorskip("torchao", reason="comes with svdq[approximate]")
    cpu = torch.device("cpu")
    full = SvdModel(str(tiny_model), Role(), cpu, torch.float32).info.weight_bytes
    int8 = SvdModel(str(tiny_model), Role(), cpu, torch.float32, ComputeOptions(approximate=("int8",)))
    assert int8.info.weight_bytes < 0.7 * full


# What was measured.


def step_of(frames: int) -> int:
    return 100 * frames


def expected(measured: MeasuredMemory, frames: int) -> int:
    return measured.expected("step", (128, 64, frames, 2), lambda shape: step_of(shape[2]))


def video(frames: int) -> SvdParameters:
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
    # The rank that needed most counts, whichever reported last.
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
    measured = MeasuredMemory(unseen=70)
    measured.learn(SMALL.model_copy(update={"frames": 25, "decode_chunk_size": 8}), {"decode": 810})
    assert measured.expected("decode", (128, 64, 100, 8), lambda shape: 100 * shape[3]) == 810
    assert measured.expected("decode", (128, 64, 25, 25), lambda shape: 100 * shape[3]) == 2_570


def in_home(folder: Path, device: str = "A5000") -> MeasuredMemory:
    return MeasuredMemory(7, 0, folder / "memory", {"model": "xt", "device": device})


def test_it_is_kept_for_the_same_model_on_the_same_gpus(tmp_path: Path) -> None:
    here, beside = in_home(tmp_path), in_home(tmp_path)
    here.learn(video(4), {"step": 430})
    beside.learn(video(8), {"step": 900})
    assert (expected(in_home(tmp_path), 4), expected(in_home(tmp_path), 8)) == (430, 900)
    assert expected(in_home(tmp_path, "H100"), 4) == 407
    (path,) = (tmp_path / "memory").iterdir()
    assert json.loads(path.read_text())["device"] == "A5000"
    rows = ('["step", [128, 64, 4, 2], 0]', '["step", [128, 64, 4], 9]', '["step", [128, 64, 4, "2"], 9]', '["step"]')
    others = ('["move", [128, 64], 9]', '["step", [128, 64, 4, 2], Infinity]', '["step", [1, 1, 1, 3], 9]', "7")
    damaged = [f'{{"bytes": [{row}], "decode_chunk_size": []}}' for row in (*rows, *others)]
    damaged += [f'{{"bytes": [], "decode_chunk_size": [{row}]}}' for row in ("[1, 2]", "[1, 2, 0]", '[1, "2", 3]')]
    for broken in ("", "{}", "[1]", "[" * 100_000, *damaged):
        path.write_text(broken)
        assert expected(in_home(tmp_path), 4) == 407, broken
    in_home(tmp_path).learn(video(4), {"step": 440})
    assert expected(in_home(tmp_path), 4) == 440


def test_a_home_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("no folder")
    measured = in_home(tmp_path)
    measured.learn(video(4), {"step": 430})
    assert expected(measured, 4) == 430


# Chunk sizes that ran out of memory.


def shape(width: int = 128, height: int = 64, frames: int = 25, chunk: int | None = None) -> SvdParameters:
    return SvdParameters(seed=1, width=width, height=height, frames=frames, decode_chunk_size=chunk)


def test_no_video_starts_higher_than_a_smaller_one_had_to_go() -> None:
    limits = ChunkLimits()
    assert limits.largest(shape()) == 25
    assert limits.ran_out(shape(), 13)
    assert limits.ran_out(shape(), 7)
    assert not limits.ran_out(shape(), 13)
    assert [limits.largest(each) for each in (shape(), shape(width=256), shape(frames=50))] == [7, 7, 7]
    assert limits.largest(shape(chunk=4)) == 4
    # Of smaller ones it says nothing.
    assert [limits.largest(each) for each in (shape(width=64), shape(frames=24))] == [25, 24]
    limits.ran_out(shape(width=256), 3)
    assert [limits.largest(each) for each in (shape(), shape(width=256), shape(width=512))] == [7, 3, 3]
    # Another program has ended, and somebody asked for more.
    assert limits.fits(shape(), 25)
    assert [limits.largest(each) for each in (shape(), shape(width=256))] == [25, 3]


def test_chunk_limits_outlive_a_worker(tmp_path: Path) -> None:
    first, beside = in_home(tmp_path), in_home(tmp_path)
    first.learn(shape(chunk=7), {}, ran_out=True)
    beside.learn(shape(width=256, chunk=3), {}, ran_out=True)
    again = in_home(tmp_path)
    assert [again.largest_chunk(each) for each in (shape(), shape(width=256))] == [7, 3]
    assert in_home(tmp_path, "H100").largest_chunk(shape()) == 25
    # One that failed before it was decoded says nothing.
    again.learn(shape(chunk=25), {})
    assert in_home(tmp_path).largest_chunk(shape()) == 7
    again.learn(shape(chunk=25), {}, ran_out=False)
    assert in_home(tmp_path).largest_chunk(shape()) == 25


def test_a_file_with_a_number_beyond_floats_is_ignored(tmp_path: Path) -> None:
    parameters = SvdParameters(seed=0, frames=2, width=64, height=64)
    MeasuredMemory(folder=tmp_path).learn(parameters, {"step": 10**9})
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    document["bytes"][0][1][0] = 10**400
    path.write_text(json.dumps(document))
    assert MeasuredMemory(folder=tmp_path).expected("step", (128, 128, 2, 2), lambda shape: 7) == 7
