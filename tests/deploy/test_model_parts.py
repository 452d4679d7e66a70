"""Measured parts of the untrained models: rows, the file that grows with them, and what cannot be measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import model_parts

from svdq.pipeline.models.svd import model as svd
from svdq.pipeline.models.svd.model import SvdModel

# diffusers makes an array of a tensor of its scheduler in a way that numpy 2 deprecates.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


class SmallMemory(SvdModel):
    """Has memory for one frame at a time, and for no float16 at all."""

    def __init__(self, name: str, parts: Any, device: torch.device, dtype: torch.dtype, *options: Any) -> None:
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd much more text.")
        super().__init__(name, parts, device, dtype, *options)

    def decode(self, tensors: Any, parameters: Any, decode_chunk_size: int) -> Any:
        if decode_chunk_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().decode(tensors, parameters, decode_chunk_size)


class Overflowing(SvdModel):
    """Makes infinities of every photo."""

    def encode(self, photo: Any, parameters: Any) -> Any:
        encoded = super().encode(photo, parameters)
        return encoded | {"image_latents": encoded["image_latents"] * torch.inf}


def size_of(folder: Path) -> int:
    """Bytes of a component's weights, without the header of its file."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(folder: Path, path: Path, *options: str, sizes: tuple[str, ...] = ("64x64",)) -> int:
    arguments = ["--model", str(folder), "--frames", "2", "--repeats", "2", "--device", "cpu", "--json", str(path)]
    return model_parts.main([*arguments, *(word for size in sizes for word in ("--size", size)), *options])


def rows_in(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert "NaN" not in text
    return json.loads(text)["rows"]


def test_each_part_is_measured_alone(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "model.json"
    code = measure(tiny_model, path, "--decode-chunk-size", "9", "--decode-chunk-size", "1")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [line.split()[0] for line in printed.out.splitlines()] == ["step", "encode", "decode", "decode"]
    step, encode, *decodes = rows_in(path)
    # More frames at a time than there are is all of them.
    assert [one["decode_chunk_size"] for one in (step, encode, *decodes)] == [None, None, 1, 2]
    for one in (step, encode, *decodes):
        assert len(one["all_s"]) == 2
        assert min(one["all_s"]) <= one["seconds"] <= max(one["all_s"])
        assert one["first_s"] > 0
        assert (one["dtype"], one["peak_bytes"], one["finite"]) == ("fp32", None, True)
    # Each first row is compared with itself, other chunks with the first ones.
    assert [one["difference"] for one in (step, encode, decodes[0])] == [0, 0, 0]
    assert 0 < decodes[1]["mean_difference"] < decodes[1]["difference"] <= 1
    # Only its part is loaded: the UNet for a step, CLIP and half of the VAE for an encode, the other half for a decode.
    unet, vae, clip = (size_of(tiny_model / name) for name in ("unet", "vae", "image_encoder"))
    assert step["weight_bytes"] == pytest.approx(unet, rel=0.05)
    assert encode["weight_bytes"] - clip + decodes[0]["weight_bytes"] == pytest.approx(vae, rel=0.05)
    assert 0 < decodes[0]["weight_bytes"] < 0.95 * vae


def test_both_experts_of_wan_are_measured_alone(tiny_wan: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "wan.json"
    command = ["--model", str(tiny_wan), "--size", "80x48", "--frames", "5", "--repeats", "1"]
    dtypes = ("--dtype", "fp32", "--dtype", "bf16")
    assert model_parts.main([*command, "--device", "cpu", "--json", str(path), *dtypes]) == 0
    printed = capsys.readouterr()
    rows = rows_in(path)
    assert [(one["part"], one["component"], one["dtype"], one["decode_chunk_size"]) for one in rows] == [
        ("step", "transformer", "fp32", None),
        ("step", "transformer", "bf16", None),
        ("step", "transformer_2", "fp32", None),
        ("step", "transformer_2", "bf16", None),
        ("encode", None, "fp32", None),
        ("encode", None, "bf16", None),
        # Tiles, and all frames.
        ("decode", None, "fp32", 1),
        ("decode", None, "fp32", 5),
        ("decode", None, "bf16", 1),
        ("decode", None, "bf16", 5),
    ]
    assert "step transformer_2 at 80x48 (bf16): " in printed.out
    for one in rows:
        assert (one["failure"], one["finite"], one["peak_bytes"], len(one["all_s"])) == ("", True, None, 1)
        assert one["seconds"] > 0
        # Each row is compared with the first of its part and expert. The VAE computes in float32 whatever the dtype,
        # and this size is a single tile.
        rounds = one["dtype"] == "bf16" and one["part"] != "decode"
        assert 0 < one["difference"] < 0.3 if rounds else one["difference"] == 0
    # Each part has only its own weights.
    parts = ("transformer", "transformer_2", "text_encoder", "vae")
    experts = size_of(tiny_wan / parts[0]), size_of(tiny_wan / parts[1])
    text_encoder, vae = size_of(tiny_wan / parts[2]), size_of(tiny_wan / parts[3])
    assert (rows[0]["weight_bytes"], rows[2]["weight_bytes"]) == pytest.approx(experts, rel=0.1)
    assert rows[4]["weight_bytes"] - text_encoder + rows[6]["weight_bytes"] == pytest.approx(vae, rel=0.1)


def test_parts_that_do_not_fit_are_said_and_the_next_is_tried(
    tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svd, "SvdModel", SmallMemory)
    path = tmp_path / "model.json"
    chunks = ("--decode-chunk-size", "1", "--decode-chunk-size", "2")
    assert measure(tiny_model, path, "--part", "decode", "--dtype", "fp16", "--dtype", "fp32", *chunks) == 0
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if "cannot be measured" in line] == [
        "decode at 64x64 (fp16 1 frames at a time) cannot be measured: out of memory",
        "decode at 64x64 (fp16 2 frames at a time) cannot be measured: out of memory",
        "decode at 64x64 (fp32 2 frames at a time) cannot be measured: out of memory",
    ]
    assert [one["failure"] for one in rows_in(path)] == ["out of memory", "out of memory", "", "out of memory"]

    # Where nothing could be measured, the exit code says so.
    assert measure(tiny_model, path, "--part", "decode", "--dtype", "fp16") == 1


def test_results_that_are_not_finite_are_said_and_never_compared(
    tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svd, "SvdModel", Overflowing)
    path = tmp_path / "model.json"
    assert measure(tiny_model, path, "--part", "encode") == 0
    [row] = rows_in(path)
    assert (row["finite"], row["difference"]) == (False, None)
    assert "not finite" in capsys.readouterr().out


class KilledAfterTwo(SvdModel):
    """Ends the measurement as SIGINT does, when a third part is opened."""

    opened = 0

    def __init__(self, *arguments: Any) -> None:
        KilledAfterTwo.opened += 1
        if KilledAfterTwo.opened > 2:
            raise KeyboardInterrupt
        super().__init__(*arguments)


def test_rows_are_written_as_they_are_measured_and_resumed_from(
    tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.json"
    with monkeypatch.context() as patched:
        patched.setattr(svd, "SvdModel", KilledAfterTwo)
        with pytest.raises(KeyboardInterrupt):
            measure(tiny_model, path, "--decode-chunk-size", "1")
    before = rows_in(path)
    assert [one["part"] for one in before] == ["step", "encode"]
    assert list(tmp_path.iterdir()) == [path]

    capsys.readouterr()
    assert measure(tiny_model, path, "--decode-chunk-size", "1") == 0
    after = rows_in(path)
    assert after[:2] == before
    assert [one["part"] for one in after] == ["step", "encode", "decode"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["decode"]

    # The result of an earlier run is gone, so that of another dtype is not compared.
    more = ("--part", "encode", "--dtype", "fp32", "--dtype", "bf16")
    assert measure(tiny_model, path, *more) == 0
    assert [(one["dtype"], one["difference"]) for one in rows_in(path)] == [
        *[("fp32", 0)] * 3,
        ("bf16", None),
    ]
