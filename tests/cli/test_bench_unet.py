"""`svdq bench unet` on the untrained model: eager first, options beside it, and what they change."""

import json
from pathlib import Path

import pytest

from svdq.cli.main import run
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
        (["--option", "magic"], "magic"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert run(["bench", "unet", "--device", "cpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]
