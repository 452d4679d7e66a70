"""What a rank tries before it starts: options that work here pass, others are one sentence."""

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import compute
from svdq.pipeline.models.compute import ComputeOptions
from svdq.pipeline.models.compute_check import check

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ComputeOptions(attention="cudnn"), "--attention cudnn does not work in float32 on this processor; use auto"),
        (ComputeOptions(attention="efficient", dtype="bf16"), "efficient does not work in bfloat16"),
    ],
)
def test_what_a_processor_cannot_is_one_sentence(options, words) -> None:
    with pytest.raises(InputError, match=words):
        check(options, CPU)


@pytest.mark.parametrize("attention", ["auto", "flash", "math"])
@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16", "bf16"])
def test_what_a_processor_can_passes(dtype, attention) -> None:
    check(ComputeOptions(dtype=dtype, attention=attention), CPU)


def test_a_compiler_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def broken(graph, example_inputs):
        raise OSError("no g++")

    monkeypatch.setattr(compute, "BACKEND", broken)
    with pytest.raises(
        InputError, match=r"^--compile blocks does not work on this processor \(.*no g\+\+.*--compile off"
    ):
        check(ComputeOptions(compiled="blocks"), CPU)
