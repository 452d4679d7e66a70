"""Describes why a model cannot be loaded, in a sentence. A restart does not help, whatever the error."""

import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.device_memory import is_out_of_memory
from svdq.pipeline.models.memory import size_text

logger = logging.getLogger(__name__)


@contextmanager
def in_a_sentence(what: str, device: torch.device, needed: Callable[[], int] | None = None) -> Iterator[None]:
    """Raise every error of a block as an `InputError`; errors of ours are unchanged.

    `what` is the model or its part, as the start of the sentence; `needed` returns the bytes of all weights that this
    rank loads, where known.

    Raises:
        InputError: why it cannot be loaded.
    """
    try:
        yield
    except SvdqError:
        raise
    except Exception as error:
        logger.debug("Loading failed.", exc_info=error)
        if is_out_of_memory(error):
            raise InputError(_out_of_memory(what, device, needed() if needed else 0)) from error
        raise InputError(
            f"{what} cannot be loaded ({said(error)}); get the model again, or one whose files belong to its configs."
        ) from error


def said(error: Exception) -> str:
    """Return the start of an error's message on one line, with its class if the message is a single word."""
    text = textwrap.shorten(str(error), 200, placeholder=" …").rstrip(".")
    return text if " " in text else f"{type(error).__name__} {text}".rstrip()


def _out_of_memory(what: str, device: torch.device, needed: int) -> str:
    """Describe needed and free memory, and what to do."""
    ran_out = f"{what} cannot be loaded: memory ran out"
    weights = f", and this rank needs {size_text(needed)} for its weights" if needed else ""
    if device.type != "cuda":
        return f"{ran_out}{weights}; start fewer ranks (--ranks), or end what else runs on this machine."
    free, total = torch.cuda.mem_get_info(device)
    there = f"{size_text(free)} of {size_text(total)} free, {size_text(torch.cuda.memory_allocated(device))} loaded"
    return (
        f"{ran_out} on {device} ({there}){weights}; "
        "start fewer ranks on this GPU (--ranks), or end what else runs on it."
    )
