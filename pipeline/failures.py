"""Describes why a sample failed, in a sentence for the person who requested it."""

import logging
import math

import torch

from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.models.base import State, VideoModel, nan_advice
from svdq.pipeline.models.device_memory import is_host_memory, is_out_of_memory, release_memory
from svdq.pipeline.protocols import Monitor
from svdq.pipeline.sample import Sample

logger = logging.getLogger(__name__)


def describe_failure(error: Exception, where: str) -> str:
    """Describe why a sample failed. Errors of svdq are sentences already; others are logged with their traceback.

    Raises:
        RuntimeError: the GPU has stopped working; only a new process can recover.
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
        # A sticky error of the process, such as an illegal access, is raised again here.
        torch.cuda.synchronize()
    return f"{type(error).__name__} {where}: {str(error)[:1000]}"


def all_finite(state: State) -> bool:
    """Return whether no tensor has NaN or infinity: aminmax propagates NaN and costs a tenth of a mask."""
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                return False
    return True


def describe_non_finite(model: VideoModel, sample: Sample, stop: int, monitor: Monitor) -> str:
    """Repeat the steps of a stage up to `stop`, checking the state after each, and name the first bad step."""
    where = f"in steps {sample.step + 1} to {stop}"  # if the repeated steps are finite
    state = dict(sample.tensors)
    denoiser = model.denoiser(state, sample.parameters)
    if not all_finite(state):
        where, stop = "before step 1", sample.step
    for index in range(sample.step, stop):
        monitor.step(sample, index)
        changed = denoiser.step(state, index)
        state.update(changed)
        if not all_finite(changed):
            where = f"in step {index + 1}"
            break
    return f"The latents became NaN or infinite {where} of {sample.parameters.steps}{nan_advice(model)}"
