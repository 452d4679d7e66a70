"""The denoising steps of one sample on one rank, with their checkpoints, cancellation and failures."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from svdq.pipeline.failures import describe_failure
from svdq.pipeline.models.base import State, VideoModel, all_finite, nan_advice
from svdq.pipeline.models.device_memory import with_second_try
from svdq.pipeline.protocols import Checkpointer, Monitor
from svdq.pipeline.sample import Sample
from svdq.pipeline.trace import Tracer

#: Seconds of denoising after which a sample is saved between two steps, besides at every hand-over.
KEEP_EVERY_S = 30.0


class StepLoop:
    """Does this rank's steps of samples."""

    def __init__(
        self,
        *,
        rank: int,
        model: VideoModel,
        monitor: Monitor,
        tracer: Tracer,
        checkpointer: Checkpointer,
        stopping: threading.Event,
        before_step: Callable[[bool], float],
        keep_every_s: float,
    ) -> None:
        """Connect it to its surroundings.

        `stopping` is set when the rank stops after the current step. `before_step` is called before each step with
        whether it is the last work here on the sample, and returns the seconds that it spent on other samples. After
        `keep_every_s` seconds a sample is saved between two steps.
        """
        self.rank = rank
        self._model = model
        self._monitor = monitor
        self._tracer = tracer
        self._checkpointer = checkpointer
        self._stopping = stopping
        self._before_step = before_step
        self._keep_every_s = keep_every_s

    def run(self, sample: Sample) -> Sample:
        """Do the steps, and save the sample after them; return it before the next step, failed, or canceled."""
        stop = sample.boundaries[self.rank + 1]
        if sample.step >= stop:
            return sample
        started = time.perf_counter()
        keep_at = started + self._keep_every_s
        index = first = sample.step
        try:
            with self._tracer.span(f"steps {first}-{stop - 1}", sample.job_id):
                denoiser = self._model.denoiser(sample.tensors, sample.parameters)
                state = {**sample.tensors}
                #: The latest of each tensor that steps here have changed.
                changed: dict[str, Tensor] = {}
                for index in range(first, stop):
                    started += self._before_step(index == stop - 1 and sample.decoder != self.rank)
                    if self._stopping.is_set():
                        self._checkpointer.save(self._advanced(sample, index, state, time.perf_counter() - started))
                        return sample
                    if self._monitor.canceled(sample.job_id):
                        return replace(sample, step=index, canceled=True, tensors={})
                    if time.perf_counter() >= keep_at:
                        keep_at += self._keep_every_s
                        # A copy: the next step may compute in place.
                        seconds = time.perf_counter() - started
                        copied = {name: tensor.clone() for name, tensor in changed.items()}
                        self._checkpointer.save(self._advanced(sample, index, state | copied, seconds))
                    self._monitor.step(sample, index)
                    what = f"step {index + 1} of {sample.parameters.steps} of {sample.job_id}"
                    changed.update(with_second_try(partial(denoiser.step, state, index), what))
                    state.update(changed)
                if not all_finite(changed.values()):
                    which = f"by step {stop} of {sample.parameters.steps}"
                    return sample.failed(f"The latents became NaN or infinite {which}{nan_advice(self._model)}")
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return sample.failed(describe_failure(error, f"in step {index + 1} of {sample.parameters.steps}"))
        seconds = time.perf_counter() - started
        sample = self._advanced(sample, stop, state, seconds)
        self._checkpointer.save(sample)
        return sample

    def _advanced(self, sample: Sample, step: int, state: State, seconds: float) -> Sample:
        """Return the sample before `step`, which this rank has reached in `seconds`."""
        if step == sample.step:
            return sample
        return replace(
            sample,
            step=step,
            tensors=state,
            stages=(*sample.stages, (self.rank, step - sample.step, seconds)),
        )
