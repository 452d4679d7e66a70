"""Why a sample failed, in a sentence for the person who asked for it. Knows no ranks."""

import logging
import math

import torch
from torch import Tensor

from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.models.device_memory import is_host_memory, is_out_of_memory, release_memory
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
    if is_out_of_memory(error):
        release_memory(error)
        what, other = ("memory", "machine") if is_host_memory(error) else ("GPU memory", "GPU")
        said = str(error).partition("\n")[0][:300] or type(error).__name__
        return (
            f"Out of {what} {where}; try fewer frames, a smaller size or a smaller decode_chunk_size, "
            f"or a {other} with more memory. ({said})"
        )
    logger.exception("A sample failed %s", where, exc_info=error)
    if torch.cuda.is_initialized():
        # An error that sticks to the process, such as an illegal access, comes up again here.
        torch.cuda.synchronize()
    return f"{type(error).__name__} {where}: {str(error)[:1000]}"


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
