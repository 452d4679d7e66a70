"""Out-of-memory errors, and descriptions of failed samples and failed loading, in a sentence for a person."""

import logging
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from svdq.pipeline.errors import InputError, NoRoomError, SampleError, SvdqError
from svdq.pipeline.imports import import_failure
from svdq.pipeline.models.compute.memory import size_text

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: What the CPU allocator, CUDA, cuBLAS and cuDNN say in a plain RuntimeError when memory runs out.
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


def release_memory(error: BaseException) -> None:
    """Free what a computation that ran out of memory still holds, also for other processes on the same GPU."""
    traceback.clear_frames(error.__traceback__)  # they hold its intermediate tensors
    torch.cuda.empty_cache()


def with_second_try(compute: Callable[[], _T], what: str) -> _T:
    """Return the result of a computation, which is tried again if memory runs out: others may have held it."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("Out of memory in %s; trying once more.", what)
        release_memory(error)
    return compute()  # the error is gone here, and with it what its traceback holds


def describe_failure(error: Exception, where: str) -> str:
    """Describe why a sample failed; log errors that are not ours. Raises RuntimeError if the GPU is broken."""
    if isinstance(error, SampleError):
        return str(error)
    if isinstance(error, SvdqError):
        return f"{error} ({where})"
    if is_out_of_memory(error):
        release_memory(error)
        on_host = isinstance(error, MemoryError) or _HOST_RAN_OUT in str(error)
        memory, other = ("memory", "machine") if on_host else ("GPU memory", "GPU")
        said = str(error).partition("\n")[0][:300] or type(error).__name__
        return (
            f"Out of {memory} {where}; try fewer frames, a smaller size or a smaller decode_chunk_size, "
            f"or a {other} with more memory. ({said})"
        )
    logger.exception("A sample failed %s", where, exc_info=error)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a sticky error of the process, such as an illegal access, is raised again here
    return f"{type(error).__name__} {where}: {str(error)[:1000]}"


@contextmanager
def in_a_sentence(what: str, device: torch.device, needed: Callable[[], int] | None = None) -> Iterator[None]:
    """Raise every error of a block that loads a model as an `InputError`, since no restart helps; ours are unchanged.

    `what` begins the sentence: the model or its part; `needed` returns the bytes of the weights that this rank loads.
    """
    try:
        yield
    except SvdqError:
        raise
    except Exception as error:
        logger.debug("Loading failed.", exc_info=error)
        if (broken := import_failure(error)) is not None:
            raise broken from error
        if is_out_of_memory(error):
            there = ""
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info(device)
                there = f" on {device} ({size_text(free)} of {size_text(total)} free)"
            num_bytes = needed() if needed else 0
            weights = f", and this rank needs {size_text(num_bytes)} for its weights" if num_bytes else ""
            raise NoRoomError(
                f"{what} cannot be loaded: memory ran out{there}{weights}; end what else runs there, start fewer ranks "
                "(--ranks), or choose what `svdq plan` says fits."
            ) from error
        said = textwrap.shorten(str(error), 200, placeholder=" …").rstrip(".")
        said = said if " " in said else f"{type(error).__name__} {said}".rstrip()
        raise InputError(
            f"{what} cannot be loaded ({said}); get the model again, or one whose files belong to its configs."
        ) from error
