"""The units of samples that a rank does: encode, denoising steps and decode; and the warm-up for a shape."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from PIL import Image
from torch import Tensor

from svdq.pipeline.loop.protocols import Surroundings
from svdq.pipeline.loop.sample import KEPT, LAST_FRAME, PHOTOS, SHOWN, SOUND, Sample, sample_body
from svdq.pipeline.models.compute.failures import describe_failure, is_out_of_memory, release_memory, with_second_try
from svdq.pipeline.models.compute.memory import chunk_of
from svdq.pipeline.models.upscaler import Upscaler
from svdq.pipeline.models.video_model import State, VideoModel, all_finite, nan_advice
from svdq.pipeline.planning.costs import Shape
from svdq.pipeline.planning.rounds import ENCODERS, REST, TEXT_ENCODER
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import Sender
from svdq.pipeline.transport.message import Kind, Message, Work
from svdq.pipeline.video_parameters import VideoParameters

KEEP_EVERY_S = 30.0  # seconds of denoising after which a sample is saved between two steps, besides at every hand-over
LONG_STEP_S = 5.0  # of a step; a sample is saved before each of such steps, since a stop may cut them off
STOP_POLL_S = 0.1  # seconds between two looks whether a rank that gives way is stopped

logger = logging.getLogger(__name__)


def _described(sample: Sample, error: Exception, where: str) -> Sample:
    return sample.failed(describe_failure(error, where))


class UnitLoop:
    """Does this rank's units of samples."""

    def __init__(
        self,
        rank: int,
        model: VideoModel,
        device: torch.device,
        surroundings: Surroundings,
        *,
        done: Callable[..., None],
        is_interrupted: Callable[[Sample], bool],
        is_stopped: Callable[[], bool],
        keep_every_s: float,
        upscaler: Upscaler | None = None,
        keep_latents: bool = False,
    ) -> None:
        """Connect it to its surroundings.

        `done` gets finished work, one `Work` or several. `is_interrupted` is asked between two units whether to leave
        the rest of a sample for later, and `is_stopped` between two frames that are upscaled, by the `upscaler` of a
        rank that decodes. After `keep_every_s` seconds a sample is saved between two steps. With `keep_latents`, a
        decoded sample keeps its tensors, as `KEPT`.
        """
        self.rank = rank
        self._model = model
        self._device = device
        self._monitor = surroundings.monitor
        self._tracer = surroundings.tracer
        self._checkpointer = surroundings.checkpointer
        self._gives_way = surroundings.gives_way
        self._decoder = Decoder(model, self._failed)
        self._upscaler = upscaler
        self._keep_latents = keep_latents
        self._done = done
        self._is_interrupted = is_interrupted
        self._is_stopped = is_stopped
        self._keep_every_s = keep_every_s
        self.is_loading = False  # whether components are loaded for a sample

    def run(self, sample: Sample) -> tuple[Sample, Tensor | None]:
        """Do the units of a sample that are this rank's.

        Returns:
            The sample, done here, interrupted, failed or canceled; and its frames (F, H, W, 3) if it was decoded.
        """
        frames = None
        if self._device.type != "cpu":
            to_move = {name: tensor for name, tensor in sample.tensors.items() if name not in (*PHOTOS, SHOWN)}
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in to_move.items()}
            sample = replace(sample, tensors={**sample.tensors, **moved})
        if sample.step < -1:
            sample = self._embed(sample)
        if sample.step < 0 and sample.has_work(self.rank):
            sample = self._encode(sample)
        self._bring(REST)
        if self._goes_on(sample) and sample.step < sample.parameters.steps:
            sample = self._denoise(sample)
        if self._goes_on(sample):
            sample, frames = self._decode(sample)
        return sample.taking(self._model.memory(sample.parameters)), frames

    def _bring(self, components: str) -> None:
        """Load a set that is not there, outside of rounds; whatever fails ends the group, and not the sample."""
        if not self._model.lacks(components):
            return
        self._monitor.idle()  # a load is not watched
        self._monitor.loading(components, None)
        self.is_loading, started = True, time.perf_counter()
        with self._tracer.span(f"load {components}"):
            self._model.hold(components)
        self.is_loading = False
        level = logging.INFO if components == TEXT_ENCODER else logging.DEBUG  # the others come for each video
        logger.log(level, "Loaded the %s in %.1f s.", components, time.perf_counter() - started)
        self._monitor.idle()

    def _synchronize(self) -> None:
        """Wait for the GPU, whose work the clock would otherwise count with what comes next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _failed(self, sample: Sample, error: Exception, where: str, done: Sample | None = None) -> Sample:
        """Return a sample as failed, or as it was, once this rank is stopped, if other programs took the memory.

        `done` is the sample after the steps that it has done here, which is saved in that case.
        """
        if is_out_of_memory(error):
            release_memory(error)
            if self._gives_way(sample.parameters):
                if done is not None:
                    self._checkpointer.save(done)
                self._monitor.idle()
                while not self._is_stopped():
                    time.sleep(STOP_POLL_S)
                return sample
        return _described(sample, error, where)

    def _goes_on(self, sample: Sample) -> bool:
        return sample.has_work(self.rank) and not self._is_interrupted(sample)

    def _embed(self, sample: Sample) -> Sample:
        if self._monitor.canceled(sample.job_id):
            return replace(sample, canceled=True, tensors={})
        if self._model.lacks(TEXT_ENCODER) and self._model.embed(sample.parameters) is None:
            self._bring(TEXT_ENCODER)
        self._monitor.step(sample, 0)
        try:
            with self._tracer.span("embed", sample.job_id):
                embed = partial(self._model.embed, sample.parameters)
                embedded = with_second_try(embed, f"the encode of the prompts of {sample.job_id}")
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return self._failed(sample, error, "while its prompt was encoded")
        assert embedded is not None
        return replace(sample, step=-1, tensors={**sample.tensors, **embedded})

    def _encode(self, sample: Sample) -> Sample:
        if self._monitor.canceled(sample.job_id):
            return replace(sample, canceled=True, tensors={})
        started = time.perf_counter()
        self._bring(ENCODERS)
        self._monitor.step(sample, 0)
        tensors = {**sample.tensors}
        photos = [Image.fromarray(tensors.pop(name).numpy()) for name in PHOTOS if name in tensors]
        try:
            with self._tracer.span("encode", sample.job_id):
                encode = partial(self._model.encode, photos[0] if photos else None, sample.parameters, *photos[1:])
                tensors.update(with_second_try(encode, f"the encode of {sample.job_id}"))
                self._synchronize()
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return self._failed(sample, error, "while its photo was encoded")
        self._bring(REST)
        seconds = time.perf_counter() - started
        self._done(Work(self.rank, sample.index, 0, 1, seconds))
        sample = replace(sample, step=0, tensors=tensors, seconds={"encode": seconds})
        if self._model.sets:
            self._checkpointer.save(sample)  # it waits for its first expert
        return sample

    def _denoise(self, sample: Sample) -> Sample:
        """Do steps and save the sample after them."""
        steps = sample.parameters.steps
        costs = sample.step_costs or (1.0,) * steps
        started = time.perf_counter()
        laps = [(sample.step, started)]  # the first of successive steps of the same cost, and when it began
        keep_at, now = started + self._keep_every_s, started
        index = first = sample.step
        _, stop = sample.steps_of(self.rank)
        state = {**sample.tensors}
        try:
            with self._tracer.span("no steps", sample.job_id) as span:
                denoiser = self._model.denoiser(sample.tensors, sample.parameters, sample.step_costs)
                changed: dict[str, Tensor] = {}  # the latest of each tensor that steps here have changed
                for index in range(first, stop):
                    # A skipped step needs what the step before has left here.
                    if costs[index] and self._is_interrupted(sample):
                        stop = index
                        break
                    if self._monitor.canceled(sample.job_id):
                        return replace(sample, step=index, canceled=True, tensors={})
                    if index > first and costs[index] != costs[index - 1]:
                        self._synchronize()
                        laps.append((index, time.perf_counter()))
                    now, before = time.perf_counter(), now
                    if costs[index] and (now >= keep_at or now - before >= LONG_STEP_S):
                        keep_at = now + self._keep_every_s
                        # A copy: the next step may compute in place.
                        seconds = now - started
                        copied = {name: tensor.clone() for name, tensor in changed.items()}
                        self._checkpointer.save(self._advanced(sample, index, state | copied, seconds))
                    self._monitor.step(sample, index)
                    what = f"step {index + 1} of {steps} of {sample.job_id}"
                    changed.update(with_second_try(partial(denoiser.step, state, index), what))
                    span.name = f"steps {first}-{index}"  # those that were done, and not those that were planned
                    state.update(changed)
                    self._monitor.picture(sample, index + 1, lambda: self._model.picture(denoiser))
                if not all_finite(changed.values()):
                    which = f"by step {stop} of {steps}"
                    return sample.failed(f"The latents became NaN or infinite {which}{nan_advice(self._model)}")
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            done = self._advanced(sample, index, state, time.perf_counter() - started)
            return self._failed(sample, error, f"in step {index + 1} of {steps}", done)
        laps.append((stop, time.perf_counter()))
        if stop > first:
            self._done(
                *(
                    Work(self.rank, sample.index, begin + 1, end + 1, ended_s - begun_s)
                    for (begin, begun_s), (end, ended_s) in pairwise(laps)
                )
            )
        seconds = laps[-1][1] - started
        sample = self._advanced(sample, stop, state, seconds)
        self._checkpointer.save(sample)
        return sample

    def _advanced(self, sample: Sample, step: int, state: State, seconds: float) -> Sample:
        """Return the sample before `step`, which this rank has reached in `seconds`."""
        if step == sample.step:
            return sample
        return replace(
            sample, step=step, tensors=state, stages=(*sample.stages, (self.rank, step - sample.step, seconds))
        )

    def _decode(self, sample: Sample) -> tuple[Sample, Tensor | None]:
        if self._monitor.canceled(sample.job_id):
            return replace(sample, canceled=True, tensors={}), None
        steps = sample.parameters.steps
        self._monitor.step(sample, steps)
        before, frames = sample.tensors, sample.tensors.get(SHOWN)
        if frames is not None:
            sample = replace(sample, tensors={name: each for name, each in before.items() if name == SOUND})
        else:
            with self._tracer.span("decode", sample.job_id):
                sample, frames = self._decoder.decode(sample)
        if frames is not None and self._keep_latents and SHOWN not in before:
            kept = {f"{KEPT}{name}": before[name] for name in self._model.decoded}
            sample = replace(sample, tensors={**sample.tensors, **kept})
        if frames is not None and sample.parameters.upscale:
            with self._tracer.span("upscale", sample.job_id):
                sample, frames = self._upscale(sample, frames)
        if frames is not None:
            upscale_s = sample.seconds.get("upscale", 0.0)
            seconds = sample.seconds.get("decode", 0.0) + upscale_s
            self._done(Work(self.rank, sample.index, steps + 1, steps + 2, seconds, upscale_s))
        return sample, frames

    def _upscale(self, sample: Sample, frames: Tensor) -> tuple[Sample, Tensor | None]:
        """Upscale decoded frames, and keep the last one as it was beside them; none if it failed or was ended."""
        assert self._upscaler is not None, "a group without an upscaler takes no such jobs"
        started = time.perf_counter()
        try:
            found = self._upscaler.upscale(
                frames,
                sample.parameters.shown_size,
                lambda: self._is_stopped() or self._monitor.canceled(sample.job_id),
            )
        except Exception as error:  # noqa: BLE001 - one bad job must not affect others
            return self._failed(sample, error, "while its frames were upscaled"), None
        if found is None:  # of a rank that stops, nothing is passed on
            return replace(sample, canceled=True, tensors={}), None
        upscaled, record = found
        tensors = {**sample.tensors, LAST_FRAME: frames[-1].clone()}
        seconds = {**sample.seconds, "upscale": time.perf_counter() - started}
        return replace(sample, tensors=tensors, seconds=seconds, upscaled={**sample.upscaled, **record}), upscaled


class Decoder:
    """Decodes samples, and remembers the chunk sizes that ran out of memory."""

    def __init__(self, model: VideoModel, failed: Callable[[Sample, Exception, str], Sample] = _described) -> None:
        """Decode with a model; `failed` returns a sample that has failed by an error, of which the text says where."""
        self._model = model
        self._failed = failed
        self._largest: dict[Shape, int] = {}  # the largest chunk size to try, of shapes that ran out of memory

    def decode(self, sample: Sample) -> tuple[Sample, Tensor | None]:
        """Decode a sample whose steps are done: the sample with its sound alone, and frames (F, H, W, 3); None: failed.

        A decode_chunk_size set by the job is tried first, since chunks change pixels; one chosen by the worker is
        limited to those that have not run out of memory for such a video. The sample has the size that was used.
        """
        asked_for = sample.parameters
        is_open = sample.chunk_chosen or asked_for.decode_chunk_size is None
        shape, chunk = Shape.of(asked_for), chunk_of(asked_for)
        if is_open:
            chunk = min(chunk, self._largest.get(shape, chunk))
        started = time.perf_counter()
        while True:
            parameters = _in_chunks(asked_for, chunk)
            try:
                frames = self._model.decode(sample.tensors, parameters, chunk)
                sound = self._model.sound(sample.tensors, parameters)
                break
            except Exception as error:  # noqa: BLE001 - one bad job must not affect others
                if not is_out_of_memory(error):
                    return self._failed(sample, error, "while its frames were decoded"), None
                # The latents still exist, so no step is repeated.
                smaller = self._largest[shape] = asked_for.smaller_chunk(chunk)
                sample = replace(sample, parameters=_in_chunks(asked_for, smaller))
                if chunk == 1:
                    return self._failed(sample, error, "while one frame at a time was decoded"), None
                logger.warning(
                    "Out of memory in the decode of %s; trying again with decode_chunk_size %d.", sample.job_id, smaller
                )
                release_memory(error)
                chunk = smaller
        seconds = {**sample.seconds, "decode": time.perf_counter() - started}
        tensors = {} if sound is None else {SOUND: sound}
        return replace(sample, parameters=parameters, tensors=tensors, seconds=seconds), frames


def _in_chunks(parameters: VideoParameters, chunk: int) -> VideoParameters:
    return parameters.model_copy(update={"decode_chunk_size": chunk})


class Warmup:
    """Remembers the shapes that a rank is warm for."""

    def __init__(self, model: VideoModel, tracer: Tracer, downstream: Sender | None) -> None:
        self._model = model
        self._tracer = tracer
        self._downstream = downstream
        self._warm: set[Shape] = set()

    def run(self, parameters: VideoParameters) -> None:
        """Warm this rank up, once for each shape; a failure fails no rank: samples try smaller chunks, or report it."""
        shape = Shape.of(parameters)
        if shape in self._warm:
            return
        self._warm.add(shape)
        with self._tracer.span("warm-up"):
            try:
                self._model.warm_up(parameters)
            except Exception as error:  # noqa: BLE001 - torch raises many types
                shape_text = f"{shape.width}x{shape.height}x{shape.frames}"
                logger.warning("%s", describe_failure(error, f"while this rank warmed up for {shape_text}"))

    def announce(self, sample: Sample) -> None:
        """Make the following ranks warm up for a sample of a new shape; on rank 0 the sample itself is the warm-up."""
        shape = Shape.of(sample.parameters)
        if shape not in self._warm and self._downstream is not None:
            body = sample_body(replace(sample, boundaries=(), tensors={}))
            self._downstream.send(Message(kind=Kind.WARM, body=body))
        if sample.job_id:
            self._warm.add(shape)
