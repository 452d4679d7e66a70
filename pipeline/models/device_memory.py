"""Memory of a rank's device: its capacity, measured peaks, and the detection of out-of-memory errors."""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from svdq.pipeline.models.memory import ACTIVITIES, RESERVE_BYTES, Activity, Shape, shape_for
from svdq.pipeline.parameters import VideoParameters

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Texts of out-of-memory errors without a class of their own: from the CPU allocator, CUDA, cuBLAS and cuDNN.
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
    """Return whether an error, or one of its causes, means that memory of the device or the host ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # SvdqError quotes other errors, so only errors of torch and its libraries are examined.
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _RAN_OUT):
            return True
        error = error.__cause__
    return False


def is_host_memory(error: BaseException) -> bool:
    """Return whether an out-of-memory error concerns the host's memory."""
    return isinstance(error, MemoryError) or _HOST_RAN_OUT in str(error)


def release_memory(error: BaseException) -> None:
    """Free what a computation that ran out of memory still holds, also for other processes on the same GPU."""
    # The error's frames hold its intermediate tensors.
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()


def with_second_try(compute: Callable[[], _T], what: str) -> _T:
    """Return the result of a computation, which is tried again if memory runs out.

    Fragments, cached blocks and other processes may have held the memory that it lacked.
    """
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("Out of memory in %s; trying once more.", what)
        release_memory(error)
    # The error is gone here, and with it what its traceback holds.
    return compute()


def capacity(device: torch.device, limit: int | None, ranks_per_gpu: int) -> int | None:
    """Return the bytes that a rank may use, including weights, after it has loaded its model; None: no limit.

    On a shared GPU, also limits this process's allocator, so that cached blocks are freed before they exceed its share.

    Args:
        device: where the rank computes.
        limit: bytes that the user allows each rank, instead of its share of the GPU.
        ranks_per_gpu: number of ranks that share the GPU, including those of other groups.
    """
    if device.type != "cuda":
        return limit  # host memory is shared, swapped and mapped, so its capacity is unknown
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    granted = limit or max(0, share_of_gpu(free, total, held, ranks_per_gpu) - RESERVE_BYTES)
    if ranks_per_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(min(1.0, granted / total), device)
    return granted


def share_of_gpu(free: int, total: int, held: int, ranks_per_gpu: int) -> int:
    """Divide a GPU's memory equally among its ranks; the shares fit together in whatever order the ranks load.

    `held` are the bytes of this rank's allocator.
    """
    # While the others load, free memory is too high; after that it excludes what other programs hold.
    return min(total // ranks_per_gpu, held + free // ranks_per_gpu)


class MemoryMeter:
    """Measures encode, step and decode once for each shape on a GPU, and nothing on a CPU. Use it from one thread.

    It counts the bytes that PyTorch's allocator reserves, since other processes cannot use fragmented or cached blocks.
    CPUs have no such counter: Linux reports the peak of all resident memory, including the mapped files of weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[tuple[str, Shape], int] = {}

    def begin(self, activity: Activity, shape: Shape) -> Callable[[], None]:
        """Start a measurement of `shape_for`'s shape; return a function to call at a successful end.

        Known shapes are not measured again.
        """
        if self._device.type != "cuda" or (activity, shape) in self._measured:
            return lambda: None
        torch.cuda.empty_cache()  # blocks cached by an earlier activity would hide the memory of this one
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)

        def end() -> None:
            self._measured[activity, shape] = torch.cuda.max_memory_reserved(self._device) - before

        return end

    @contextmanager
    def measuring(self, activity: Activity, shape: Shape) -> Iterator[None]:
        """Measure a block; see `begin`."""
        end = self.begin(activity, shape)
        yield
        end()

    def measured(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured bytes of each activity for a shape of video, besides weights."""
        return {
            activity: self._measured[what]
            for activity in ACTIVITIES
            if (what := (activity, shape_for(activity, parameters))) in self._measured
        }


def name_of(device: torch.device) -> str:
    """Return the kind of a device, such as "NVIDIA RTX A5000" or "cpu"."""
    name: Any = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return str(name)
