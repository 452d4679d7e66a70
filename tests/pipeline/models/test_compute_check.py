"""What a rank tries before it starts: options that work here pass, others are one sentence."""

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import options
from svdq.pipeline.models.compute_check import check
from svdq.pipeline.models.options import ComputeOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16", "bf16"])
def test_what_a_processor_can_passes(dtype) -> None:
    check(ComputeOptions(dtype=dtype), CPU)


def test_a_dtype_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def no_convolution(*arguments, **named):
        raise RuntimeError("not implemented for 'BFloat16'\nand more")

    monkeypatch.setattr(torch.nn.functional, "conv3d", no_convolution)
    with pytest.raises(InputError, match=r"^--dtype bf16 does not work on this processor \(not .*; use --dtype auto"):
        check(ComputeOptions(dtype="bf16"), CPU)


def test_a_compiler_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def broken(graph, example_inputs):
        raise OSError("no g++")

    monkeypatch.setattr(options, "BACKEND", broken)
    with pytest.raises(
        InputError, match=r"^--compile blocks does not work on this processor \(.*no g\+\+.*--compile off"
    ):
        check(ComputeOptions(compiled="blocks"), CPU)
