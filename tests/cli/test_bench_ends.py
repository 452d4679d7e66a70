"""`svdq bench ends` on the untrained model: encode and decode against a step, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from svdq.cli.main import run
from svdq.pipeline.bench import ends_parts
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.tiny import write_tiny_model

# diffusers makes an array of a tensor of its scheduler in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


class SmallMemory(SvdModel):
    """Has room for one frame at a time, and for no float16 at all."""

    def __init__(self, name: str, parts: Any, device: torch.device, dtype: torch.dtype) -> None:
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd much more text.")
        super().__init__(name, parts, device, dtype)

    def decode(self, tensors: Any, parameters: Any, decode_chunk_size: int) -> Any:
        if decode_chunk_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().decode(tensors, parameters, decode_chunk_size)


def size_of(folder: Path) -> int:
    """Bytes of a component's weights, without the header of its file."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_each_part_is_measured_alone_and_compared_with_a_step(tmp_path: Path, capsys: Any) -> None:
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "ends", "--model", str(tmp_path / "tiny"), "--size", "64x64", "--frames", "2", "--repeats", "2",
        "--device", "cpu", "--decode-chunk-size", "9", "--decode-chunk-size", "1", "--json", str(tmp_path / "ends"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [line.split()[0] for line in printed.out.splitlines()] == ["part", "step", "encode", "decode", "decode"]
    step, encode, *decodes = json.loads((tmp_path / "ends").read_text())["parts"]
    # More frames at a time than there are is all of them.
    assert [one["decode_chunk_size"] for one in (step, encode, *decodes)] == [None, None, 1, 2]
    assert step["worth_steps"] == 1
    for one in (encode, *decodes):
        assert one["worth_steps"] == pytest.approx(one["seconds"] / step["seconds"])
        assert len(one["all_s"]) == 2
        assert min(one["all_s"]) <= one["seconds"] <= max(one["all_s"])
        assert one["peak_bytes"] is None
        assert one["estimated_bytes"] > 1e6
    assert decodes[0]["estimated_bytes"] < decodes[1]["estimated_bytes"]
    # Only its part is loaded: the UNet for a step, CLIP and half of the VAE for an encode, the other half for a decode.
    unet, vae, clip = (size_of(tmp_path / "tiny" / name) for name in ("unet", "vae", "image_encoder"))
    assert step["weight_bytes"] == pytest.approx(unet, rel=0.05)
    halves = encode["weight_bytes"] - clip + decodes[0]["weight_bytes"]
    assert halves == pytest.approx(vae, rel=0.05)
    assert 0 < decodes[0]["weight_bytes"] < 0.95 * vae


def test_what_does_not_fit_is_said_and_the_next_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_parts, "SvdModel", SmallMemory)
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "ends", "--model", str(tmp_path / "tiny"), "--size", "64x64", "--frames", "2", "--repeats", "1",
        "--device", "cpu", "--decode-chunk-size", "1", "--decode-chunk-size", "2", "--no-step",
        "--dtype", "fp16", "--dtype", "fp32", "--json", str(tmp_path / "ends"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0
    assert [line.split()[:3] for line in printed.out.splitlines()[1:]] == [
        ["encode", "float32", printed.out.splitlines()[1].split()[2]],
        ["decode", "float32", "1"],
    ]
    said = [line for line in printed.err.splitlines() if "cannot be measured" in line]
    assert said == [
        "The decode of 2 frames at a time cannot be measured at 64x64 in float32: out of memory",
        "The encode cannot be measured at 64x64 in float16: out of memory",
        "The decode of 1 frames at a time cannot be measured at 64x64 in float16: out of memory",
        "The decode of 2 frames at a time cannot be measured at 64x64 in float16: out of memory",
    ]
    parts = json.loads((tmp_path / "ends").read_text())["parts"]
    assert [one["failure"] for one in parts] == ["", "", "out of memory", *["out of memory"] * 3]
    assert {one["worth_steps"] for one in parts} == {None}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "100x100"], "multiples of 64"),
        (["--size", "0x0"], "--size 0x0 is not allowed"),
        (["--model", "preview"], "no UNet"),
        (["--decode-chunk-size", "0"], "0"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert run(["bench", "ends", "--device", "cpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]
