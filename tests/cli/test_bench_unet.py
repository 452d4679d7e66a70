"""`svdq bench unet` on the untrained model: eager first, options beside it, and what they change."""

import json
from pathlib import Path

import pytest
import torch

from svdq.cli.main import run
from svdq.pipeline.bench.unet import relative_difference
from svdq.pipeline.models.tiny import write_tiny_model


def test_exact_options_change_no_more_than_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "unet", "--model", str(tmp_path / "tiny"), "--size", "64x64", "--frames", "2", "--repeats", "2",
        "--device", "cpu", "--option", "fused-qkv", "--option", "channels-last",
        "--option", "cudnn", "--json", str(tmp_path / "unet.json"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [line.split()[0] for line in printed.out.splitlines()] == ["option", "eager", "fused-qkv", "channels-last"]
    eager, fused, last, cudnn = json.loads((tmp_path / "unet.json").read_text())["unet"]
    assert "--attention cudnn does not work in float32" in cudnn["failure"]
    assert "cudnn cannot be run in float32: " in printed.err
    assert (eager["option"], eager["dtype"], eager["difference"], eager["speedup"]) == ("eager", "float32", 0, 1)
    assert max(fused["difference"], last["difference"]) < 1e-4
    for figures in (eager, fused, last):
        assert len(figures["steps_s"]) == 2
        assert figures["weight_bytes"] == eager["weight_bytes"] > 4 * 1.8e6
        assert figures["flops_per_s"] > 0
        assert figures["activation_bytes"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "100x100"], "multiples of 64"),
        (["--size", "0x64"], "--size 0x64 is not allowed"),
        (["--frames", "0"], "--frames"),
        (["--option", "magic"], "magic"),
        (["--model", "preview"], "no UNet"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert run(["bench", "unet", "--device", "cpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "is a StableDiffusionPipeline"),
        ("model_index.json", None, "model_index.json"),
        ("unet/config.json", {"in_channels": 9}, "in_channels is 9"),
        ("unet/config.json", {"down_block_types": ["NoSuchBlock"] * 4}, "unet"),
        ("unet/config.json", {"num_attention_heads": [3, 3]}, "unet"),
    ],
)
def test_what_is_no_svd_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, change: dict[str, object] | None, words: str
) -> None:
    write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "tiny" / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    options = ["--model", str(tmp_path / "tiny"), "--size", "64x64", "--frames", "2", "--device", "cpu"]
    assert run(["bench", "unet", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    sentence = printed.err.splitlines()[-1]
    assert words in sentence
    assert str(tmp_path / "tiny") in sentence


def test_a_half_precision_product_is_no_measure_of_a_processor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path / "tiny")
    code = run([
        "bench", "unet", "--model", str(tmp_path / "tiny"), "--size", "64x64", "--frames", "1", "--repeats", "1",
        "--device", "cpu", "--dtype", "bf16", "--option", "eager", "--json", str(tmp_path / "unet.json"),
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "%" not in printed.out
    [eager] = json.loads((tmp_path / "unet.json").read_text())["unet"]
    assert eager["matrix_share"] is None
    assert eager["flops_per_s"] > 0


def test_a_difference_that_is_no_number_is_none() -> None:
    assert relative_difference(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25
    assert relative_difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 4.0])) is None
    assert relative_difference(torch.tensor([1.0]), torch.tensor([torch.inf])) is None
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0
