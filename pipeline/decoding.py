"""From latents to frames on the last rank, with fewer frames at a time when memory runs out. Knows no ranks."""

import logging
import time
from dataclasses import replace

import torch

from svdq.pipeline.failures import give_back, say_why
from svdq.pipeline.models.model import Frames, VideoModel
from svdq.pipeline.sample import Sample

logger = logging.getLogger(__name__)


def decode(model: VideoModel, sample: Sample) -> tuple[Sample, Frames | None]:
    """Decode a sample whose steps are done.

    Returns:
        The sample without its tensors and with the `decode_chunk_size` that was used, and its frames; or the sample
        with the reason for which it failed, and None.
    """
    parameters = sample.parameters
    chunk_size = min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)
    started = time.perf_counter()
    while True:
        try:
            frames = model.decode(sample.tensors, parameters, chunk_size)
            break
        except torch.OutOfMemoryError as error:
            if chunk_size == 1:
                return sample.failed(say_why(error, "while one frame at a time was decoded")), None
            # The latents are still here: nothing is denoised twice.
            chunk_size = (chunk_size + 1) // 2
            logger.warning(
                "Out of memory in the decode of %s; trying again with decode_chunk_size %d.",
                sample.job_id,
                chunk_size,
            )
            give_back(error)
        except Exception as error:  # noqa: BLE001 - one bad job harms nobody else
            return sample.failed(say_why(error, "while its frames were decoded")), None
    return (
        replace(
            sample,
            parameters=parameters.model_copy(update={"decode_chunk_size": chunk_size}),
            tensors={},
            seconds={**sample.seconds, "decode": time.perf_counter() - started},
        ),
        frames,
    )
