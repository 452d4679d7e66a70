"""`svdq bench unet` on the untrained model: eager first, options beside it, and what they change."""

import json
from pathlib import Path

import pytest

from svdq.cli import bench_unet
from svdq.pipeline.models.tiny import write_tiny_model


def test_options_are_those_that_can_be_measured() -> None:
    from svdq.pipeline.bench.unet import OPTIONS

    assert tuple(OPTIONS) == bench_unet.OPTIONS


def test_exact_options_change_nothing_and_the_rest_says_how_much(svdq, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    done = svdq(
        "bench", "unet", "--model", tmp_path / "tiny", "--size", "64x64", "--frames", "2", "--repeats", "2",
        "--device", "cpu", "--option", "fused-qkv", "--option", "channels-last", "--json", tmp_path / "unet.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["option", "eager", "fused-qkv", "channels-last"]
    eager, fused, last = json.loads((tmp_path / "unet.json").read_text())["unet"]
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
def test_wrong_input_is_one_sentence(svdq, options: list[str], words: str) -> None:
    done = svdq("bench", "unet", "--device", "cpu", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
