"""Memory of the device: errors that say it ran out, peaks, and what ranks that share a GPU may plan with."""

import numpy as np
import pytest
import torch

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.compute.failures import is_out_of_memory
from svdq.pipeline.models.diffusers_model import MemoryMeter
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.worker.device import capacity, share_of_gpu

GB = 1_000_000_000
SMALL = SvdParameters(seed=1, frames=2, width=128, height=64, decode_chunk_size=1)
#: Errors as torch, CUDA's libraries and the host's allocators word them.
RAN_OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuDNN error: not enough workspace"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("the workshop is out of memory sticks"),
    SampleError("The photo is torn."),
]


@pytest.mark.parametrize("error", RAN_OUT, ids=str)
def test_memory_runs_out_under_many_names(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_about_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_numpy_and_torch_on_this_host_are_recognised() -> None:
    for ask in (lambda: np.zeros(2**60, np.uint8), lambda: torch.empty(2**60, dtype=torch.uint8)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            ask()
        assert is_out_of_memory(caught.value)


def loads(free: int, total: int, num_ranks: int, weights: int) -> list[int]:
    """Give what each rank reckons as its share when it looks after loading its weights, one rank after the other."""
    return [share_of_gpu(free - weights * (rank + 1), total, weights, num_ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_the_shares_of_all_ranks_on_a_gpu_fit_in_whatever_order_they_load(num_ranks: int) -> None:
    """Those of other groups count too: each would take all that is free for its own."""
    shares = loads(80 * GB, 80 * GB, num_ranks, 3 * GB)
    assert 79 * GB < sum(shares) <= 80 * GB
    # All are loaded, as after a restart of one of them: another program holds 20 GB.
    free = 60 * GB - num_ranks * 3 * GB
    assert sum(share_of_gpu(free, 80 * GB, 3 * GB, num_ranks) for _ in range(num_ranks)) <= 60 * GB
    assert share_of_gpu(free, 80 * GB, 3 * GB, num_ranks) > 60 * GB // num_ranks - num_ranks


class Gpu:
    """Counts as PyTorch's allocator of a GPU does: it keeps blocks that were freed, until it is told to let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.reserved = self.peak = 0
        self.fraction: float | None = None
        for name, function in {
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.reserved),
            "empty_cache": lambda: setattr(self, "reserved", self.allocated),
            "mem_get_info": lambda device: (24 * GB - self.reserved, 24 * GB),
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def compute(self, tensors: int, in_pieces: int = 0) -> None:
        self.reserved = max(self.reserved, self.allocated + tensors + in_pieces)
        self.peak = max(self.peak, self.reserved)


def test_peaks_are_in_reserved_bytes_and_not_hidden_by_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.allocated = gpu.reserved = 3 * GB
    meter = MemoryMeter(torch.device("cuda", 0))
    with meter.measuring("decode", (128, 64, 2, 1)):
        gpu.compute(9 * GB, in_pieces=GB)
    with meter.measuring("step", (128, 64, 2, 2)):
        gpu.compute(4 * GB, in_pieces=2 * GB)
    assert meter.measured(SMALL) == {"step": 6 * GB, "decode": 10 * GB}


def test_a_process_takes_no_more_than_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, device = Gpu(monkeypatch), torch.device("cuda", 0)
    gpu.allocated = gpu.reserved = 3 * GB
    alone, limited = capacity(device, None, 1), capacity(device, 20 * GB, 1)
    assert (alone, limited, gpu.fraction) == (23.5 * GB, 20 * GB, None)
    half = capacity(device, None, 2)
    assert half == 11.5 * GB
    assert gpu.fraction == half / (24 * GB)
    assert capacity(torch.device("cpu"), None, 2) is None
    assert capacity(torch.device("cpu"), 5, 2) == 5


def test_each_activity_is_measured_once_for_what_decides_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    meter = MemoryMeter(torch.device("cuda", 0))
    shapes = {"encode": (128, 64), "step": (128, 64, 2, 2), "decode": (128, 64, 2, 1)}
    for number, (activity, shape) in enumerate([*shapes.items(), *shapes.items()], start=1):
        with meter.measuring(activity, shape):
            gpu.compute(number)
    assert meter.measured(SMALL) == {"encode": 1, "step": 2, "decode": 3}
    # Nothing but what an activity depends on makes another shape of it.
    assert set(meter.measured(SMALL.model_copy(update={"decode_chunk_size": 2}))) == {"encode", "step"}
    assert set(meter.measured(SMALL.model_copy(update={"max_guidance_scale": 1.0}))) == {"encode", "decode"}
    assert set(meter.measured(SMALL.model_copy(update={"frames": 3}))) == {"encode"}
    assert meter.measured(SMALL.model_copy(update={"height": 128})) == {}


def test_what_ran_out_of_memory_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    meter = MemoryMeter(torch.device("cuda", 0))
    with pytest.raises(torch.OutOfMemoryError), meter.measuring("decode", (128, 64, 2, 1)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert meter.measured(SMALL) == {}
