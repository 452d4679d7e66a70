"""Describes why a sample failed, in a sentence for the person who requested it."""

import logging

import torch

from svdq.pipeline.errors import SampleError, SvdqError
from svdq.pipeline.models.device_memory import is_host_memory, is_out_of_memory, release_memory

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
