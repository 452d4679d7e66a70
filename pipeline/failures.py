"""Why a sample failed, in a sentence for the person who asked for it. Knows no ranks."""

import logging
import math
import traceback

import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.models.finite_weights import blame
from svdq.pipeline.models.model import VideoModel
from svdq.pipeline.sample import Sample
from svdq.pipeline.transport.ports import Monitor

logger = logging.getLogger(__name__)


def say_why(error: Exception, where: str) -> str:
    """Say why a sample failed. What we raise is a sentence already; the rest is logged with its traceback.

    Raises:
        RuntimeError: the GPU computes nothing any more, which is no sample's failure; only a new process mends it.
    """
    if isinstance(error, SampleError):
        return str(error)
    if isinstance(error, SvdqError):
        return f"{error} ({where})"
    if isinstance(error, torch.OutOfMemoryError):
        give_back(error)
        return (
            f"Out of GPU memory {where}; try fewer frames, a smaller size or a smaller decode_chunk_size, "
            f"or a GPU with more memory. ({str(error).splitlines()[0][:300]})"
        )
    logger.exception("A sample failed %s", where, exc_info=error)
    if torch.cuda.is_initialized():
        # An error that sticks to the process, such as an illegal access, comes up again here.
        torch.cuda.synchronize()
    return f"{type(error).__name__} {where}: {str(error)[:1000]}"


def give_back(error: torch.OutOfMemoryError) -> None:
    """Let go of the memory of a computation that ran out of it, also to other processes on the same GPU."""
    # What it had made so far is still held by the frames that the error came through.
    traceback.clear_frames(error.__traceback__)
    torch.cuda.empty_cache()


def all_finite(latents: Tensor) -> bool:
    """Whether no latent is NaN or infinite: the extremes tell (both are NaN if any is), at a tenth of a mask's cost."""
    low, high = torch.aminmax(latents)
    return math.isfinite(low) and math.isfinite(high)


def say_where_it_broke(model: VideoModel, sample: Sample, stop: int, monitor: Monitor) -> str:
    """Do the steps of a stage again up to `stop`, looking at the latents after each, and name the first to blame."""
    where = f"in steps {sample.step + 1} to {stop}"  # should the same steps do better now
    latents = sample.tensors["latents"]
    denoiser = model.denoiser(sample.tensors, sample.parameters)
    if not all(map(all_finite, sample.tensors.values())):
        where, stop = "before step 1", sample.step
    for index in range(sample.step, stop):
        monitor.step(sample, index)
        latents = denoiser.step(latents, index)
        if not all_finite(latents):
            where = f"in step {index + 1}"
            break
    return f"The latents became NaN or infinite {where} of {sample.parameters.steps}{blame(model, latents.dtype)}"
