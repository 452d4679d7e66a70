"""Writes and reads checkpoints: a job that is taken again continues at its last one. Does not import Redis.

A thread writes them beside the stage loop. `checkpoint_codec` says what is in one, `shelf` where they are.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Resumption, Sample
from svdq.producer.status.ranks import Trouble
from svdq.worker.recovery.checkpoint_codec import Codec
from svdq.worker.recovery.shelf import Shelf

logger = logging.getLogger(__name__)

#: Bytes of samples that wait to be written, on the rank's device. Of more the oldest is dropped, since the rank that
#: has it by now writes one as well; the newest waits whatever its size.
MAX_WAITING_BYTES = 256 * 2**20
#: Seconds of rest for each second of writing: the disk and the cores are there for the videos first.
REST = 4.0
#: Seconds after which checkpoints of a job that nobody knows are removed.
UNKNOWN_S = 24 * 60 * 60.0


@dataclass(frozen=True, kw_only=True)
class Archive:
    """What rank 0 does with checkpoints."""

    #: Where they lie.
    shelf: Shelf
    #: How they are written.
    codec: Codec

    def furthest(self, job_id: str, parameters: VideoParameters) -> Sample | None:
        """Read a job's furthest checkpoint; one that cannot be used is logged and ignored."""
        try:
            for step in self.shelf.steps(job_id) or ():
                data = self.shelf.read(job_id, step)
                try:
                    return self.codec.decode(data, job_id, parameters)
                except Exception as error:  # noqa: BLE001 - anyone may have written it: no content of it fails a job
                    logger.warning("The checkpoint of job %s at step %d cannot be used: %s.", job_id, step, error)
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
        if not sample.tensors:
            return
        ready = None
        if self._codec.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        with self._changed:
            self._waiting.pop(sample.job_id, None)
            self._waiting[sample.job_id] = _Kept(sample=sample, ready=ready)
            while len(self._waiting) > 1 and self._num_waiting_bytes() > MAX_WAITING_BYTES:
                del self._waiting[next(iter(self._waiting))]
            self._changed.notify_all()

    def _num_waiting_bytes(self) -> int:
        return sum(tensor.nbytes for kept in self._waiting.values() for tensor in kept.sample.tensors.values())

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
