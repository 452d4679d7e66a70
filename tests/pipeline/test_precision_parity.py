"""The comparison with diffusers that `make gpu-check` runs: on a CPU in float32 it has to find nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from svdq.pipeline.bench.precision_parity import Pair, largest_difference, main
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.parameters import VideoParameters

VIDEO = VideoParameters(seed=3, frames=2, steps=3, width=64, height=64)


def test_frames_equal_those_of_diffusers_and_steps_are_timed_in_both_loops(tiny_model: Path) -> None:
    image = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 90).convert("RGB")
    pair = Pair(str(tiny_model), torch.device("cpu"), torch.float32)
    assert pair.difference(image, VIDEO) == 0
    theirs_s, ours_s = pair.steps_s(image, VIDEO, 2)
    assert len(theirs_s) == len(ours_s) == 2
    assert min(theirs_s + ours_s) > 0


def test_a_difference_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Darker(SvdModel):
        def decode(self, *arguments, **named):
            return np.maximum(super().decode(*arguments, **named), 7) - 7

    monkeypatch.setattr("svdq.pipeline.bench.precision_parity.SvdModel", Darker)
    image = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 90).convert("RGB")
    pair = Pair(str(tiny_model), torch.device("cpu"), torch.float32)
    assert pair.difference(image, VIDEO) == 7
    # Differences of bytes are not taken modulo 256.
    assert largest_difference(np.zeros(1, np.uint8), np.full(1, 255, np.uint8)) == 255


def test_wrong_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    photo = str(Path(__file__).parents[2] / "docs" / "demo" / "photo.jpg")
    assert main(["--model", "/nowhere", "--image", photo, "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Error: There is no model folder '/nowhere'")
    with pytest.raises(SystemExit):
        main(["--model", "/nowhere", "--image", photo, "--steps", "1"])
