"""A rank's device, with fakes in place of a GPU that is there and does not work."""

from collections.abc import Callable

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import options
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import dtype_for
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.worker.device import check_computes, check_device, choose_device

CPU = torch.device("cpu")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Make torch see two GPUs, of which none can be chosen if there is a failure."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(failure: Exception | None = None) -> None:
        def set_device(_device: torch.device) -> None:
            if failure is not None:
                raise failure

        found = {"is_available": lambda: True, "device_count": lambda: 2, "set_device": set_device}
        for name, function in found.items():
            monkeypatch.setattr(torch.cuda, name, function)

    return put


def test_ranks_take_turns_at_gpus(two_gpus) -> None:
    two_gpus()
    assert [choose_device("auto", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert choose_device("cpu", 1) == CPU


def test_a_gpu_that_cannot_be_chosen_is_said_in_a_sentence(two_gpus) -> None:
    two_gpus(RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might"))
    with pytest.raises(InputError, match=r"^The GPU of rank 1 .* busy or unavailable\.$"):
        choose_device("cuda", 1)


def test_torchs_own_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(InputError, match=r"\(The NVIDIA driver on your system is too old \(found version 11040\)\); "):
        check_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that computes")
def test_a_gpu_that_cannot_compute_is_refused() -> None:
    with pytest.raises(InputError, match=r"^The GPU cuda:0 cannot compute: .*(CUDA|NVIDIA).*\. Check"):
        check_computes(torch.device("cuda", 0), torch.float16, ComputeOptions())


@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16", "bf16"])
def test_a_processor_computes_in_all_dtypes(dtype) -> None:
    options = ComputeOptions(dtype=dtype)
    check_computes(CPU, dtype_for(ResolvedModel(name="preview"), CPU, options), options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that computes")
def test_a_dtype_that_does_not_work_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^--dtype bf16 does not work on the GPU cuda:0 \(.*\); use --dtype auto"):
        check_computes(torch.device("cuda", 0), torch.bfloat16, ComputeOptions(dtype="bf16"))


def test_a_compiler_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def broken(graph, example_inputs):
        raise OSError("no g++")

    monkeypatch.setattr(options, "BACKEND", broken)
    with pytest.raises(
        InputError, match=r"^--compile blocks does not work on this processor \(.*no g\+\+.*--compile off"
    ):
        check_computes(CPU, torch.float32, ComputeOptions(compiled="blocks"))
