"""`svdq bench precision`: what follows from figures, and the sweep on the untrained model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from svdq.cli.bench_precision import ON_A_PROCESSOR
from svdq.cli.main import run
from svdq.pipeline.bench import ends_parts
from svdq.pipeline.bench.doubts import unsteady
from svdq.pipeline.bench.ends_parts import PartFigures
from svdq.pipeline.bench.precision import Case, HandOver, cases_of, conclusions
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.tiny import write_tiny_model

NOTHING = HandOver(transfer_s=0.0, overhead_s=0.0)


# diffusers makes an array of a tensor of its scheduler in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def case(size: str, dtype: str, *costs: float | None, difference: float | None = None) -> Case:
    """A case with seconds of a step, an encode and a decode."""
    width, height = map(int, size.split("x"))
    step_s, encode_s, decode_s = costs
    return Case(
        width=width,
        height=height,
        dtype=dtype,
        step_s=step_s,
        encode_s=encode_s,
        decode_s=decode_s,
        difference=difference,
    )


def test_a_faster_type_is_held_against_a_second_gpu() -> None:
    # 10 steps: 30, 12 and 20 s a video. A second GPU halves each, and a second is lost on each of two.
    cases = [
        case("128x64", "fp32", 2.8, 1.0, 1.0, difference=0.0),
        case("128x64", "fp16", 1.0, 1.0, 1.0, difference=2e-3),
        case("128x64", "bf16", 1.8, 1.0, 1.0, difference=2e-2),
    ]
    assert conclusions(cases, 10, HandOver(transfer_s=0.0, overhead_s=1.0)) == [
        "At 128x64 fp16 makes 2.50 times as many videos an hour as fp32 (a step is 2.80 times as fast): more than a "
        "second GPU brings in fp32 (1.88 times).",
        "At 128x64 fp16 makes 1.67 times as many videos an hour as bf16 (a step is 1.80 times as fast): less than a "
        "second GPU brings in bf16 (1.82 times).",
        # One GPU: 12 s a video. Two: 14 s to the first, 7 s a video: 14 + 7 (n - 1) = 12 n at n = 1.4.
        "At 128x64 in fp16, the fastest type measured, a second GPU pays from 1.40 videos on: it makes 1.71 times as "
        "many an hour.",
        "What the UNet predicts in fp16 differs from fp32 by up to 2.0e-03 of its largest value (at 128x64).",
        "What the UNet predicts in bf16 differs from fp32 by up to 2.0e-02 of its largest value (at 128x64).",
    ]


def test_a_smaller_size_is_held_against_a_second_gpu() -> None:
    cases = [
        case(size, "fp16", step_s, 0.0, 0.0) for size, step_s in (("64x64", 1.0), ("128x128", 5.0), ("128x64", 2.5))
    ]
    small, large, middle = ("64x64", "128x128", "128x64")
    fastest = "in fp16, the fastest type measured,"
    pays = f"{fastest} a second GPU pays from 1.00 videos on: it makes 2.00 times as many an hour."
    going = "times as many videos an hour in fp16, smaller ones:"
    assert conclusions(cases, 25, NOTHING) == [
        f"At {small} {pays}",
        f"At {large} {pays}",
        f"Going down from {large} to {middle} makes 2.00 {going} about what a second GPU brings (2.00 times).",
        f"At {middle} {pays}",
        f"Going down from {middle} to {small} makes 2.50 {going} more than a second GPU brings (2.00 times).",
    ]


def test_equal_types_and_a_second_gpu_that_the_decode_fills() -> None:
    cases = [case("64x64", "fp16", 1.00, 0.0, 30.0), case("64x64", "bf16", 1.01, 0.0, 30.0)]
    assert conclusions(cases, 10, NOTHING) == [
        "At 64x64 fp16 and bf16 make about as many videos an hour.",
        "At 64x64 in fp16, the fastest type measured, a second GPU pays from 1.00 videos on: it makes 1.33 times as "
        "many an hour, and no more since the decode alone fills it.",
    ]
    # Handing over costs as much as is gained.
    assert conclusions(cases[:1], 10, HandOver(transfer_s=0.0, overhead_s=10.0)) == [
        "At 64x64 in fp16, the fastest type measured, a second GPU does not pay: it makes 1.00 times as many videos an "
        "hour."
    ]


def test_what_was_not_measured_is_not_concluded_from() -> None:
    cases = [
        case("128x64", "fp32", 2.0, 1.0, None),
        case("128x64", "fp16", None, None, 1.0),
        case("64x64", "fp32", 1.0, 1.0, 1.0),
    ]
    assert conclusions(cases, 10, NOTHING) == [
        "What a second GPU brings at 128x64 in fp32 is not known, since no decode could be measured.",
        "What a second GPU brings at 128x64 in fp16 is not known, since no step and no encode could be measured.",
        "At 64x64 in fp32, the fastest type measured, a second GPU pays from 1.00 videos on: it makes 2.00 times as "
        "many an hour.",
    ]


def figures(part: str, *all_s: float, chunk: int | None = None, failure: str = "") -> PartFigures:
    return PartFigures(
        part=part,
        width=64,
        height=64,
        frames=4,
        dtype="float16",
        decode_chunk_size=chunk,
        seconds=min(all_s, default=0.0),
        all_s=all_s,
        failure=failure,
    )


def test_the_first_decode_that_fits_counts() -> None:
    found = cases_of([
        figures("step", 1.0),
        figures("decode", chunk=4, failure="out of memory"),
        figures("decode", 3.0, chunk=2),
        figures("decode", 5.0, chunk=1),
    ])  # fmt: skip
    assert found == [case("64x64", "fp16", 1.0, None, 3.0)]


def test_unsteady_times_are_said() -> None:
    assert unsteady([figures("step", 1.0, 1.1), figures("decode", failure="out of memory")]) == []
    [sentence] = unsteady([figures("step", 1.0, 1.1), figures("encode", 1.0, 1.5)])
    assert sentence.startswith("1 of 2 times differ by more than 20%")


class SmallMemory(SvdModel):
    """Has room for one frame at a time at 64x128, and makes gray frames, since half precision takes long on CPUs."""

    def decode(self, tensors: Any, parameters: Any, decode_chunk_size: int) -> Any:
        if decode_chunk_size > 1 and parameters.height > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return np.full((parameters.num_frames, parameters.height, parameters.width, 3), 128, np.uint8)


def test_the_sweep_goes_on_where_memory_does_not_suffice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_parts, "SvdModel", SmallMemory)
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "precision", "--model", str(tmp_path / "tiny"), "--sizes", "64x64,64x128", "--frames", "2",
        "--repeats", "1", "--device", "cpu", "--dtype", "fp16", "--dtype", "fp32", "--json", str(tmp_path / "found"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found = json.loads((tmp_path / "found").read_text())
    tried = [(one["part"], one["decode_chunk_size"], bool(one["failure"])) for one in found["parts"]]
    # Float32 comes first, since the others are compared with it; each part with both sizes.
    assert tried == 2 * [
        *[("step", None, False)] * 2,
        *[("encode", None, False)] * 2,
        ("decode", 2, False),
        ("decode", 2, True),
        ("decode", 1, False),
    ]
    assert [one["dtype"] for one in found["parts"]] == ["float32"] * 7 + ["float16"] * 7
    differences = [one["difference"] for one in found["parts"] if one["part"] == "step"]
    assert differences[:2] == [0, 0]
    assert all(1e-5 < difference < 1e-2 for difference in differences[2:])
    assert printed.err.count("The decode of 2 frames at a time cannot be measured at 64x128") == 2
    rows, _, sentences = printed.out.partition("\n\n")
    assert [line.split()[0] for line in rows.splitlines()] == ["size", *["64x64"] * 6, *["64x128"] * 6]
    assert sentences.splitlines() == found["sentences"]
    assert found["sentences"][0] == ON_A_PROCESSOR
    assert any(line.startswith("At 64x128 in ") for line in found["sentences"])


class Overflowing(SvdModel):
    """Makes infinities of every photo in bfloat16, and gray frames."""

    def encode(self, photo: Any, parameters: Any) -> Any:
        encoded = super().encode(photo, parameters)
        if encoded["image_latents"].dtype == torch.bfloat16:
            encoded["image_latents"] = encoded["image_latents"] * torch.inf
        return encoded

    def decode(self, tensors: Any, parameters: Any, decode_chunk_size: int) -> Any:
        return np.full((parameters.num_frames, parameters.height, parameters.width, 3), 128, np.uint8)


def test_results_that_are_not_finite_are_said_and_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_parts, "SvdModel", Overflowing)
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "precision", "--model", str(tmp_path / "tiny"), "--sizes", "64x64", "--frames", "1", "--repeats", "1",
        "--device", "cpu", "--dtype", "fp32", "--dtype", "bf16", "--json", str(tmp_path / "found"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "nan" not in printed.out
    assert [line for line in printed.out.splitlines() if "not finite" in line] == [
        "What the encoder makes in bf16 is not finite with these weights (at 64x64): a worker fails such videos."
    ]
    text = (tmp_path / "found").read_text()
    assert "NaN" not in text
    assert [one["finite"] for one in json.loads(text)["parts"]] == [True, True, True, True, False, True]
    assert json.loads(text)["parts"][4]["difference"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "64x64,100x100"], "multiples of 64"),
        (["--sizes", "large"], "--sizes large"),
        (["--sizes", "64x64,0x64"], "--sizes 0x64 is not allowed"),
        (["--transfer-ms", "nan"], "--transfer-ms"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert run(["bench", "precision", "--device", "cpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]
