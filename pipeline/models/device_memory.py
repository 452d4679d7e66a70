"""Memory of the device that a rank computes on: how much it has, what peaks took, and errors that say it ran out."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from svdq.pipeline.models.memory import ACTIVITIES, RESERVE_BYTES, Activity, Shape, shape_for
from svdq.pipeline.parameters import VideoParameters

#: What errors without a class of their own say: the allocator of processors, CUDA, cuBLAS and its like, cuDNN.
_HOST_RAN_OUT = "DefaultCPUAllocator"
_RAN_OUT = (
    _HOST_RAN_OUT,
    "out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "STATUS_ALLOC_FAILED",
    "unable to find an engine",
    "not enough workspace",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that memory of the device or the host ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # SvdqError and its like quote others; only what torch and its libraries raise is read.
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _RAN_OUT):
            return True
        error = error.__cause__
    return False


def is_host_memory(error: BaseException) -> bool:
    """Return whether it is the host's memory that an out-of-memory error is about."""
    return isinstance(error, MemoryError) or _HOST_RAN_OUT in str(error)


def release_memory(error: BaseException) -> None:
    """Free what a computation that ran out of memory still holds, also for other processes on the same GPU."""
    # What it had made so far is held by the frames that the error came through.
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()


def capacity(device: torch.device, limit: int | None, ranks_per_gpu: int) -> int | None:
    """Give the bytes that a rank may plan with, weights included, once it has loaded its model; None: no limit.

    On a GPU that ranks share, also caps what this process's allocator takes, so that blocks it keeps for later are
    freed before they go beyond its share.

    Args:
        device: where the rank computes.
        limit: bytes that the user grants each rank, in place of its share of the GPU.
        ranks_per_gpu: ranks that share the GPU, those of other groups included.
    """
    if device.type != "cuda":
        return limit  # the memory of a host is shared, swapped and mapped: what fits is unknown
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    granted = limit or max(0, share_of_gpu(free, total, held, ranks_per_gpu) - RESERVE_BYTES)
    if ranks_per_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(min(1.0, granted / total), device)
    return granted


def share_of_gpu(free: int, total: int, held: int, ranks_per_gpu: int) -> int:
    """Divide a GPU's memory equally among the ranks on it; the shares of all of them fit, in whatever order they load.

    Args:
        free: bytes that no process has.
        total: bytes of the GPU.
        held: bytes that this rank's allocator has.
        ranks_per_gpu: ranks that share it.
    """
    # While the others load, what is free is too much; once they have, it leaves out what other programs hold.
    return min(total // ranks_per_gpu, held + free // ranks_per_gpu)


class Counter(Protocol):
    """Counts the bytes of a device that are in use."""

    def restart(self) -> int:
        """Look for a peak from now on; return what is in use now."""
        ...

    def peak(self) -> int:
        """Return the most that was in use at a time since `restart`."""
        ...


class CudaCounter:
    """PyTorch's allocator of one GPU.

    It counts reserved bytes: blocks that are in pieces or kept for later are no other process's to use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> int:
        """See `Counter`."""
        torch.cuda.empty_cache()  # what an earlier activity has left in reserve would hide what this one takes
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See `Counter`."""
        return torch.cuda.max_memory_reserved(self._device)


class MemoryMeter:
    """Measures encode, step and decode once for each shape. For one thread."""

    def __init__(self, counter: Counter | None) -> None:
        """Measure with a counter, or nothing without one.

        Processors have none: Linux counts the peak of all resident memory, the mapped files of weights included.
        """
        self._counter = counter
        self._measured: dict[tuple[str, Shape], int] = {}

    @classmethod
    def of(cls, device: torch.device) -> "MemoryMeter":
        """Make the meter of a device."""
        return cls(CudaCounter(device) if device.type == "cuda" else None)

    def begin(self, activity: Activity, shape: Shape) -> Callable[[], None]:
        """Begin to measure for what `shape_for` gives; return what to call at the end, if it got there.

        What is known already is not measured again.
        """
        if self._counter is None or (activity, shape) in self._measured:
            return lambda: None
        counter, before = self._counter, self._counter.restart()

        def end() -> None:
            self._measured[activity, shape] = counter.peak() - before

        return end

    @contextmanager
    def measuring(self, activity: Activity, shape: Shape) -> Iterator[None]:
        """Measure a block; see `begin`."""
        end = self.begin(activity, shape)
        yield
        end()

    def measured(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Give the bytes that each took for a shape of video, besides weights, as far as it is known."""
        return {
            activity: self._measured[what]
            for activity in ACTIVITIES
            if (what := (activity, shape_for(activity, parameters))) in self._measured
        }


def name_of(device: torch.device) -> str:
    """Name the kind of a device, such as "NVIDIA RTX A5000" or "cpu"."""
    name: Any = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return str(name)
