"""Decodes latents to frames, in smaller chunks of frames when memory runs out."""

import logging
import time
from dataclasses import replace

from torch import Tensor

from svdq.pipeline.failures import describe_failure
from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.models.device_memory import is_out_of_memory, release_memory
from svdq.pipeline.models.memory import ChunkLimits, chunk_of
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample

logger = logging.getLogger(__name__)


class Decoder:
    """Decodes samples, and remembers the chunk sizes that ran out of memory."""

    def __init__(self, model: VideoModel) -> None:
        self._model = model
        self._limits = ChunkLimits()

    def decode(self, sample: Sample) -> tuple[Sample, Tensor | None]:
        """Decode a sample whose steps are done.

        A decode_chunk_size set by the job is tried first, since chunks change pixels; one chosen by the worker is
        limited to sizes that have not run out of memory before.

        Returns:
            The sample without its tensors and with the decode_chunk_size used, and its frames (F, H, W, 3), uint8, on
            the model's device; or the failed sample and None.
        """
        asked_for = sample.parameters
        is_open = sample.chunk_chosen or asked_for.decode_chunk_size is None
        chunk = self._limits.largest(asked_for) if is_open else chunk_of(asked_for)
        started = time.perf_counter()
        while True:
            parameters = _in_chunks(asked_for, chunk)
            try:
                frames = self._model.decode(sample.tensors, parameters, chunk)
                break
            except Exception as error:  # noqa: BLE001 - one bad job must not affect others
                if not is_out_of_memory(error):
                    return sample.failed(describe_failure(error, "while its frames were decoded")), None
                # The latents still exist, so no step is repeated.
                smaller = asked_for.smaller_chunk(chunk)
                self._limits.ran_out(asked_for, smaller)
                sample = replace(sample, ran_out=True, parameters=_in_chunks(asked_for, smaller))
                if chunk == 1:
                    return sample.failed(describe_failure(error, "while one frame at a time was decoded")), None
                logger.warning(
                    "Out of memory in the decode of %s; trying again with decode_chunk_size %d.",
                    sample.job_id,
                    smaller,
                )
                release_memory(error)
                chunk = smaller
        self._limits.fits(asked_for, chunk)
        seconds = {**sample.seconds, "decode": time.perf_counter() - started}
        return replace(sample, parameters=parameters, tensors={}, seconds=seconds), frames


def _in_chunks(parameters: VideoParameters, chunk: int) -> VideoParameters:
    return parameters.model_copy(update={"decode_chunk_size": chunk})
