"""Measured parts of the untrained models: rows, the file that grows with them, and what cannot be measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import model_parts
from gpu_checks.model_cases import Row

from svdq.pipeline.models.svd import model as svd
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.wan import model as wan
from svdq.pipeline.models.wan.model import WanModel

# diffusers makes an array of a tensor of its scheduler in a way that numpy 2 deprecates.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


class SmallMemory(SvdModel):
    """Has memory for one frame at a time, and for no float16 at all."""

    def __init__(self, name: str, parts: Any, device: torch.device, dtype: torch.dtype, options: Any) -> None:
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd much more text.")
        super().__init__(name, parts, device, dtype, options)

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


def test_dtypes_and_sizes_are_compared_with_the_first_of_their_size(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    dtypes = ("--dtype", "fp32", "--dtype", "bf16", "--dtype", "fp32")
    assert measure(tiny_model, path, "--part", "step", *dtypes, sizes=("64x64", "128x64")) == 0
    rows = rows_in(path)
    assert [(one["dtype"], one["width"]) for one in rows] == [("fp32", 64), ("fp32", 128), ("bf16", 64), ("bf16", 128)]
    assert [one["difference"] for one in rows[:2]] == [0, 0]
    assert all(0 < one["mean_difference"] < one["difference"] < 0.2 for one in rows[2:])


def test_a_step_with_int8_weights_is_smaller_and_near(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("torchao", reason="comes with svdq[approximate]")
    path = tmp_path / "model.json"
    assert measure(tiny_model, path, "--part", "step", "--approximate", "int8") == 0
    exact, int8 = rows_in(path)
    assert int8["weight_bytes"] < 0.7 * exact["weight_bytes"]
    assert 0 < int8["difference"] < 0.1
    assert "int8" in capsys.readouterr().out


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


def test_a_step_of_wan_is_measured_with_and_without_guidance(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    calls: list[None] = []
    forward = diffusers.WanTransformer3DModel.forward

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        calls.append(None)
        return forward(self, *given, **named)

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "forward", counted)
    path = tmp_path / "rows.json"
    common = ["--model", str(tiny_wan), "--size", "64x64", "--frames", "5", "--device", "cpu", "--part", "step"]
    numbers = []
    for guidance in ("on", "off"):
        calls.clear()
        options = ["--repeats", "1", "--guidance", guidance, "--json", str(path)]
        assert model_parts.main([*common, *options]) == 0
        numbers.append(len(calls))
    assert numbers == [8, 4]  # two experts, two runs, two predictions with guidance
    rows = rows_in(path)
    assert [row["guidance"] for row in rows] == ["on", "on", "off", "off"]
    assert all(row["load_s"] > 0 for row in rows)


def test_a_step_with_streamed_blocks_is_the_same(tiny_wan: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "wan.json"
    shape = ["--size", "80x48", "--frames", "5", "--repeats", "1", "--device", "cpu", "--part", "step"]
    options = ["--compile", "off", "--offload", "blocks", "--json", str(path)]
    assert model_parts.main(["--model", str(tiny_wan), *shape, *options]) == 0
    plain, streamed = rows_in(path)[:2]
    assert (plain["offload"], streamed["offload"]) == ("off", "blocks")
    assert streamed["component"] == plain["component"] == "transformer"
    assert streamed["difference"] == 0
    assert "step transformer at 80x48 (fp32 streamed): " in capsys.readouterr().out


def test_the_prompt_is_encoded_in_each_run(
    tiny_wan: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    class Reading(WanModel):
        """Records the prompts."""

        def encode(self, photo: Any, parameters: Any) -> Any:
            texts.append(parameters.prompt)
            return super().encode(photo, parameters)

    monkeypatch.setattr(wan, "WanModel", Reading)
    options = ("--part", "encode", "--frames", "5", "--repeats", "1", "--device", "cpu")
    sizes = ["--size", "64x64", "--size", "80x64", "--json", str(tmp_path / "rows.json")]
    assert model_parts.main(["--model", str(tiny_wan), *options, *sizes]) == 0
    # Embeddings are cached by text.
    assert len(texts) == len(set(texts)) == 4


@pytest.mark.parametrize(("family", "shape"), [("svd", (1024, 576, 14)), ("wan", (832, 480, 81))])
def test_shapes_are_the_models_own_by_default(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, shape: tuple[int, ...]
) -> None:
    folder = request.getfixturevalue({"svd": "tiny_model", "wan": "tiny_wan"}[family])
    seen: list[tuple[int, ...]] = []

    def record(_name: str, cases: Any, **_options: Any) -> Any:
        seen.extend((case.width, case.height, case.frames) for case in cases)
        return iter([Row(**asdict(case), failure="not measured") for case in cases])

    monkeypatch.setattr(model_parts, "measure", record)
    options = ["--device", "cpu", "--part", "step", "--json", str(tmp_path / "rows.json")]
    assert model_parts.main([*options, "--model", str(folder)]) == 1
    assert set(seen) == {shape}


def test_what_does_not_fit_is_said_and_the_next_is_tried(
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


def test_rows_are_in_the_file_as_soon_as_they_are_measured_and_are_resumed_from(
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
