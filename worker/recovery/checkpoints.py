"""Keeps videos that are half done, so that a job that is taken again goes on where it was. Knows no Redis.

A checkpoint is what travels between ranks, in a safetensors file: the tensors as they are, and in its metadata the
JSON of `message.sample_body` with the model, the kind of device and how it computes, all of which decide the bits. It
is written beside the stage loop, by a thread that never has more than a few samples to hold.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Resumption, Sample
from svdq.pipeline.transport.message import sample_body, sample_from
from svdq.producer.status.ranks import Trouble
from svdq.worker.recovery.shelf import Shelf

logger = logging.getLogger(__name__)

#: Samples with more are not kept: those of the preview model are cheaper to make again than to write.
MAX_BYTES = 64 * 2**20
#: Samples that wait to be written; of more the oldest goes, since the ranks that have it by now keep it, too.
MAX_WAITING = 3
#: Seconds of rest for each second of writing: the disk and the cores are there for the videos first.
REST = 4.0
#: Seconds after which checkpoints of a job that nobody knows are removed.
UNKNOWN_S = 24 * 60 * 60.0


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Writes samples as bytes and reads them back; refuses what would not give the same bits here."""

    #: The model's name.
    model: str
    #: Where tensors are wanted.
    device: torch.device
    #: How the model computes: `ModelInfo.compute`.
    compute: dict[str, Any] = field(default_factory=dict)

    def encode(self, sample: Sample) -> bytes:
        """Write a sample; its tensors are copied to the host."""
        how = {"model": self.model, "device": self.device.type, "compute": self.compute}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sample.tensors.items()}
        return safetensors.torch.save(
            tensors, {"svdq": json.dumps(how | {"sample": sample_body(sample)}, allow_nan=False)}
        )

    def decode(self, data: bytes, job_id: str, parameters: VideoParameters) -> Sample:
        """Read a sample of a job.

        Raises:
            ValueError: it is not one, or was made by another model, with other parameters or in another way.
        """
        try:
            length = int.from_bytes(data[:8], "little")
            document: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["svdq"])
            tensors = safetensors.torch.load(data)
        except (KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"it is not a checkpoint: {error!r}") from error
        sample = sample_from(document["sample"], {name: tensor.to(self.device) for name, tensor in tensors.items()})
        # The decode_chunk_size chosen when it was begun stays.
        ours = {"decode_chunk_size": sample.parameters.decode_chunk_size}
        made_with = (document["model"], document["device"], sample.job_id, sample.parameters)
        if made_with != (self.model, self.device.type, job_id, parameters.model_copy(update=ours)):
            raise ValueError("it was made by another model, with other parameters or on another kind of device")
        if (before := document.get("compute")) != self.compute:
            raise ValueError(f"it was computed with {_words(before)}, and now it is {_words(self.compute)}")
        if sample.ended or "latents" not in sample.tensors or not 0 <= sample.step <= parameters.steps:
            raise ValueError("it holds nothing to go on with")
        return sample


def _words(compute: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (compute or {}).items()) or "no options"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """What rank 0 does with checkpoints."""

    #: Where they lie.
    shelf: Shelf
    #: How they are written.
    codec: Codec

    def furthest(self, job_id: str, parameters: VideoParameters) -> Sample | None:
        """Read a job's furthest checkpoint; what cannot be read is passed over."""
        try:
            for step in self.shelf.steps(job_id) or ():
                try:
                    return self.codec.decode(self.shelf.read(job_id, step), job_id, parameters)
                except ValueError as error:
                    logger.warning("The checkpoint of job %s at step %d is of no use: %s.", job_id, step, error)
        except (OSError, UnavailableError) as error:
            logger.warning("The checkpoints of job %s cannot be read (%s); it starts anew.", job_id, error)
        return None

    def open(self, job_id: str) -> None:
        """Make a place for the checkpoints of a job that is taken."""
        with contextlib.suppress(OSError, UnavailableError):  # the spool will say so
            self.shelf.open(job_id)

    def sweep(self, states: Callable[[list[str]], Mapping[str, bool]]) -> None:
        """Remove what is kept of jobs that have ended.

        Args:
            states: tells of jobs whether they have ended; leaves out those that nobody knows. They may be another
                server's, so their checkpoints are removed only when they are old.
        """
        try:
            ages_s = self.shelf.ages_s()
            ended = states(list(ages_s))
            for job_id, age_s in ages_s.items():
                if ended.get(job_id, age_s > UNKNOWN_S):
                    self.shelf.clear(job_id)
        except (OSError, UnavailableError) as error:
            logger.warning("Old checkpoints cannot be removed (%s).", error)


def resumed(sample: Sample, step_seen: int) -> Sample:
    """Note in a sample that it is taken up again.

    Args:
        sample: as it was kept.
        step_seen: the step at which the job was seen last, which may be further on.
    """
    again = Resumption(from_step=sample.step, steps_done_again=max(0, step_seen - sample.step))
    return replace(sample, resumed=(*sample.resumed, again))


@dataclass(frozen=True, kw_only=True)
class _Kept:
    sample: Sample
    #: On a GPU: when the sample's tensors are computed.
    ready: torch.cuda.Event | None


class Spool:
    """The keeper of one rank."""

    def __init__(self, shelf: Shelf, codec: Codec) -> None:
        self._shelf = shelf
        self._codec = codec
        #: Guards the four below.
        self._changed = threading.Condition()
        #: What is to be written by job, the oldest first.
        self._waiting: dict[str, _Kept] = {}
        #: Jobs whose checkpoints are to be removed.
        self._ended: list[str] = []
        self._is_working = False
        #: Whether the rank is about to end and there is no time to rest.
        self._hurried = False
        #: Why checkpoints cannot be written at present; videos go on without.
        self.trouble: Trouble | None = None
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def keep(self, sample: Sample) -> None:
        """Take a sample to be written soon; in place of an older one of the same job."""
        if not sample.tensors or sum(tensor.nbytes for tensor in sample.tensors.values()) > MAX_BYTES:
            return
        ready = None
        if self._codec.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        with self._changed:
            self._waiting.pop(sample.job_id, None)
            self._waiting[sample.job_id] = _Kept(sample=sample, ready=ready)
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._changed.notify_all()

    def forget(self, job_id: str) -> None:
        """Remove soon what is kept of a job that has ended."""
        with self._changed:
            self._waiting.pop(job_id, None)
            self._ended.append(job_id)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written and removed, and say whether it is; from now on without rests."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._waiting or self._ended or self._is_working), timeout_s)

    def _run(self) -> None:
        if self._codec.device.type == "cuda":
            # A thread begins on the first GPU, and would open a context there.
            torch.cuda.set_device(self._codec.device)
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._ended)
                self._is_working = True
                ended, self._ended = self._ended, []
                kept = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            started = time.monotonic()
            try:
                for job_id in ended:
                    self._shelf.clear(job_id)
                if kept is not None:
                    self._write(kept)
                if self.trouble is not None:
                    self.trouble = None
                    logger.info("Checkpoints can be written again.")
            except Exception as error:  # noqa: BLE001 - a checkpoint is a courtesy: no video fails for it
                self._note(error)
            kept = None  # its tensors are free to go while this thread waits
            rest_s = REST * (time.monotonic() - started)
            with self._changed:
                self._changed.wait_for(lambda: self._hurried, rest_s)

    def _note(self, error: Exception) -> None:
        trouble = self.trouble
        if trouble is None:
            logger.warning("Checkpoints cannot be written (%s); videos go on without.", error)
            trouble = Trouble(
                effect="Checkpoints cannot be written, videos go on without",
                reason=str(error),
                since=time.time(),
                attempts=0,
            )
        self.trouble = trouble.model_copy(update={"reason": str(error), "attempts": trouble.attempts + 1})

    def _write(self, kept: _Kept) -> None:
        sample = kept.sample
        there = self._shelf.steps(sample.job_id)
        if there is None or (there and there[0] >= sample.step):
            return  # the job has ended, or a rank further on was faster
        if kept.ready is not None:
            kept.ready.synchronize()
            # A stream of this thread's own: the copy to the host overlaps the computation.
            with torch.cuda.stream(torch.cuda.Stream(self._codec.device)):
                self._write_finite(sample)
        else:
            self._write_finite(sample)

    def _write_finite(self, sample: Sample) -> None:
        latents: Tensor = sample.tensors["latents"]
        # Between two steps of a stage nobody has looked yet; what is broken is not worth going on with.
        if bool(torch.isfinite(latents.sum(dtype=torch.float32))):
            self._shelf.write(sample.job_id, sample.step, self._codec.encode(sample))
