"""The checkpoints of a rank: written in a thread beside the stage loop, read when a job is taken again."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.loop.protocols import Checkpointer
from svdq.pipeline.loop.sample import Resumption, Sample
from svdq.pipeline.models.video_model import all_finite
from svdq.pipeline.transport.links import end_of_stream, own_stream
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.status.ranks import NO_CHECKPOINTS, Condition
from svdq.worker.checkpoint.store import CheckpointStore, Codec

logger = logging.getLogger(__name__)

#: Bytes of samples that may wait to be written, on the rank's device; beyond it the oldest is dropped, since the rank
#: that has that sample now writes one as well.
MAX_WAITING_BYTES = 256 * 2**20
REST = 4.0  # seconds of rest for each second of writing, since videos need the disk and the cores, too
UNKNOWN_S = 24 * 60 * 60.0  # seconds after which the checkpoints of an unknown job are removed


class Checkpoints(Checkpointer):
    """The checkpointer of one rank; rank 0 also reads and removes."""

    def __init__(self, store: CheckpointStore, codec: Codec) -> None:
        self._store = store
        self._codec = codec
        self._changed = threading.Condition()  # guards the four below
        #: Samples to write by job, the oldest first; on a GPU with the event of their tensors.
        self._waiting: dict[str, tuple[Sample, torch.cuda.Event | None]] = {}
        self._ended: list[str] = []  # jobs whose checkpoints are removed
        self._is_working = False
        self._hurried = False
        self.condition: Condition | None = None  # why checkpoints cannot be written at present
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def furthest(self, job_id: str, parameters: VideoParameters) -> Sample | None:
        """Read a job's furthest checkpoint; one that cannot be used is logged and ignored."""
        try:
            for step in self._store.steps(job_id) or ():
                data = self._store.read(job_id, step)
                try:
                    return self._codec.decode(data, job_id, parameters)
                except Exception as error:  # noqa: BLE001 - anyone may have written it, so no content may fail a job
                    logger.warning("The checkpoint of job %s at step %d cannot be used: %s.", job_id, step, error)
        except SvdqError as error:
            logger.warning("The checkpoints of job %s cannot be read (%s); it starts anew.", job_id, error)
        return None

    def open(self, job_id: str) -> None:
        """Make a folder for the checkpoints of a job that is taken."""
        with self._changed:
            # A job that is retried right after its end keeps its folder.
            self._ended = [ended for ended in self._ended if ended != job_id]
        with contextlib.suppress(SvdqError):  # the writer reports it
            self._store.open(job_id)

    def sweep(self, states: Callable[[list[str]], Mapping[str, bool]]) -> None:
        """Remove checkpoints of jobs that ended by `states`, and old ones of jobs that it leaves out."""
        try:
            self._store.sweep()
            ages_s = self._store.ages_s()
            ended = states(list(ages_s))
            for job_id, age_s in ages_s.items():
                if ended.get(job_id, age_s > UNKNOWN_S):
                    self._store.clear(job_id)
        except SvdqError as error:
            logger.warning("Old checkpoints cannot be removed (%s).", error)

    def forget(self, job_id: str) -> None:
        """Queue the removal of a job's checkpoints."""
        with self._changed:
            self._waiting.pop(job_id, None)
            self._ended.append(job_id)
            self._changed.notify_all()

    def save(self, sample: Sample) -> None:
        """Queue a sample, in place of an older one of the same job."""
        if not sample.tensors:
            return
        ready = end_of_stream(self._codec.device)
        with self._changed:
            self._waiting.pop(sample.job_id, None)
            self._waiting[sample.job_id] = (sample, ready)
            num_bytes = sum(each.nbytes for other, _ in self._waiting.values() for each in other.tensors.values())
            while len(self._waiting) > 1 and num_bytes > MAX_WAITING_BYTES:
                oldest, _ = self._waiting.pop(next(iter(self._waiting)))
                num_bytes -= sum(each.nbytes for each in oldest.tensors.values())
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait, from now on without rests, until everything is written and removed; return whether it is."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._waiting or self._ended or self._is_working), timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._ended)
                self._is_working = True
                ended, self._ended = self._ended, []
                pending = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            started = time.monotonic()
            try:
                for job_id in ended:
                    self._store.clear(job_id)
                if pending is not None:
                    self._write(*pending)
                if self.condition is not None:
                    self.condition = None
                    logger.info("Checkpoints can be written again.")
            except Exception as error:  # noqa: BLE001 - no video fails because of a checkpoint
                self._note(error)
            pending = None  # frees its tensors
            rest_s = REST * (time.monotonic() - started)
            with self._changed:
                self._changed.wait_for(lambda: self._hurried, rest_s)

    def _note(self, error: Exception) -> None:
        if self.condition is None:
            logger.warning("Checkpoints cannot be written (%s); videos continue without.", error)
        before = self.condition or Condition(effect=NO_CHECKPOINTS, reason="", since=time.time(), attempts=0)
        self.condition = before.model_copy(update={"reason": str(error), "attempts": before.attempts + 1})

    def _write(self, sample: Sample, ready: torch.cuda.Event | None) -> None:
        there = self._store.steps(sample.job_id)
        if there is None or (there and there[0] >= sample.step):
            return  # the job has ended, or a later rank was faster
        with own_stream(self._codec.device):
            if ready is not None:
                ready.synchronize()
            # Between two steps the stage has not checked the state yet, and a broken one is of no use.
            if all_finite(sample.tensors.values()):
                self._store.write(sample.job_id, sample.step, self._codec.encode(sample))


def resumed(sample: Sample, step_seen: int) -> Sample:
    """Add a resumption to a sample from a checkpoint; `step_seen` is the last step that the job reached."""
    again = Resumption(from_step=sample.step, steps_done_again=max(0, step_seen - sample.step))
    return replace(sample, resumed=(*sample.resumed, again))
