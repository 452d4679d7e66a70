"""A rank's device, with fakes in place of a GPU that is there and does not work."""

import pytest
import torch
from torch.nn import functional

from svdq.pipeline.errors import InputError
from svdq.pipeline.models import compute_options as options
from svdq.pipeline.models.compute_options import ComputeOptions
from svdq.pipeline.models.loader import dtype_for
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.worker.device import check_computes, check_device, choose_device

CPU = torch.device("cpu")


class Gpus:
    """torch.cuda of a machine with two GPUs."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.chosen: list[torch.device] = []

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        if self.failure is not None:
            raise self.failure
        self.chosen.append(device)

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("is_available", "device_count", "set_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))


@pytest.fixture(autouse=True)
def no_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_ranks_take_turns_at_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus().put(monkeypatch)
    assert [choose_device("auto", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert choose_device("cpu", 1) == torch.device("cpu")


def test_a_gpu_that_cannot_be_chosen_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported later"
    Gpus(RuntimeError(busy)).put(monkeypatch)
    with pytest.raises(InputError, match=r"^The GPU of rank 1 .* busy or unavailable\.$"):
        choose_device("cuda", 1)


def test_torchs_own_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(InputError, match=r"\(The NVIDIA driver on your system is too old \(found version 11040\)\); "):
        check_device("cuda")


class OnTheHost:
    """Computes on the processor what a GPU was asked for, but for one operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception) -> None:
        self.computed: list[str] = []
        ones = torch.ones

        def on_host(size: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
            return ones(size, dtype=dtype)

        monkeypatch.setattr(torch, "ones", on_host)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        for name in ("conv3d", "conv2d", "scaled_dot_product_attention"):
            monkeypatch.setattr(functional, name, self._operation(name, getattr(functional, name), broken, error))

    def _operation(self, name, operation, broken: str, error: Exception):
        def compute(*arguments: torch.Tensor, **named: int) -> torch.Tensor:
            if name == broken:
                raise error
            self.computed.append(name)
            return operation(*arguments, **named)

        return compute


@pytest.mark.parametrize("broken", ["conv3d", "scaled_dot_product_attention"])
def test_a_gpu_that_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    reason = "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaErrorNoKernelImage"
    OnTheHost(monkeypatch, broken, RuntimeError(reason))
    with pytest.raises(InputError, match=r"^The GPU cuda:0 cannot compute: .*no kernel image .* device\. Check"):
        check_computes(torch.device("cuda", 0), torch.float16, ComputeOptions())


def test_a_gpu_that_computes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = OnTheHost(monkeypatch, "", RuntimeError())
    check_computes(torch.device("cuda", 0), torch.float32, ComputeOptions())
    assert gpu.computed == ["conv3d", "conv2d", "scaled_dot_product_attention"]
    check_computes(CPU, torch.float32, ComputeOptions())


@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16", "bf16"])
def test_a_processor_computes_in_all_dtypes(dtype) -> None:
    options = ComputeOptions(dtype=dtype)
    check_computes(CPU, dtype_for(ResolvedModel(name="preview"), CPU, options), options)


def test_a_dtype_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def no_convolution(*arguments, **named):
        raise RuntimeError("not implemented for 'BFloat16'\nand more")

    monkeypatch.setattr(torch.nn.functional, "conv3d", no_convolution)
    with pytest.raises(InputError, match=r"^--dtype bf16 does not work on this processor \(not .*; use --dtype auto"):
        check_computes(CPU, torch.bfloat16, ComputeOptions(dtype="bf16"))


def test_a_compiler_that_does_not_work_is_one_sentence(monkeypatch) -> None:
    def broken(graph, example_inputs):
        raise OSError("no g++")

    monkeypatch.setattr(options, "BACKEND", broken)
    with pytest.raises(
        InputError, match=r"^--compile blocks does not work on this processor \(.*no g\+\+.*--compile off"
    ):
        check_computes(CPU, torch.float32, ComputeOptions(compiled="blocks"))
