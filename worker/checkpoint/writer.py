"""Writes checkpoints in a thread beside the stage loop. Does not import Redis."""

import logging
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from svdq.pipeline.sample import Sample
from svdq.producer.status.ranks import Condition
from svdq.worker.checkpoint.codec import Codec
from svdq.worker.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)

#: Bytes of samples that wait to be written, on the rank's device. Of more the oldest is dropped, since the rank that
#: has it by now writes one as well; the newest waits whatever its size.
MAX_WAITING_BYTES = 256 * 2**20
#: Seconds of rest for each second of writing: the disk and the cores are there for the videos first.
REST = 4.0


@dataclass(frozen=True, kw_only=True)
class _Pending:
    sample: Sample
    #: On a GPU: when the sample's tensors are computed.
    ready: torch.cuda.Event | None


class CheckpointWriter:
    """The checkpointer of one rank."""

    def __init__(self, store: CheckpointStore, codec: Codec) -> None:
        self._store = store
        self._codec = codec
        #: Guards the four below.
        self._changed = threading.Condition()
        #: What is to be written by job, the oldest first.
        self._waiting: dict[str, _Pending] = {}
        #: Jobs whose checkpoints are to be removed.
        self._ended: list[str] = []
        self._is_working = False
        #: Whether the rank is about to end and there is no time to rest.
        self._hurried = False
        #: Why checkpoints cannot be written at present; videos go on without.
        self.condition: Condition | None = None
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def save(self, sample: Sample) -> None:
        """Take a sample to be written soon; in place of an older one of the same job."""
        if not sample.tensors:
            return
        ready = None
        if self._codec.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        with self._changed:
            self._waiting.pop(sample.job_id, None)
            self._waiting[sample.job_id] = _Pending(sample=sample, ready=ready)
            while len(self._waiting) > 1 and self._num_waiting_bytes() > MAX_WAITING_BYTES:
                del self._waiting[next(iter(self._waiting))]
            self._changed.notify_all()

    def _num_waiting_bytes(self) -> int:
        return sum(tensor.nbytes for pending in self._waiting.values() for tensor in pending.sample.tensors.values())

    def forget(self, job_id: str) -> None:
        """Remove soon what is pending of a job that has ended."""
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
                pending = self._waiting.pop(next(iter(self._waiting))) if self._waiting else None
            started = time.monotonic()
            try:
                for job_id in ended:
                    self._store.clear(job_id)
                if pending is not None:
                    self._write(pending)
                if self.condition is not None:
                    self.condition = None
                    logger.info("Checkpoints can be written again.")
            except Exception as error:  # noqa: BLE001 - a checkpoint is a courtesy: no video fails for it
                self._note(error)
            pending = None  # its tensors are free to go while this thread waits
            rest_s = REST * (time.monotonic() - started)
            with self._changed:
                self._changed.wait_for(lambda: self._hurried, rest_s)

    def _note(self, error: Exception) -> None:
        condition = self.condition
        if condition is None:
            logger.warning("Checkpoints cannot be written (%s); videos go on without.", error)
            condition = Condition(
                effect="Checkpoints cannot be written, videos go on without",
                reason=str(error),
                since=time.time(),
                attempts=0,
            )
        self.condition = condition.model_copy(update={"reason": str(error), "attempts": condition.attempts + 1})

    def _write(self, pending: _Pending) -> None:
        sample = pending.sample
        there = self._store.steps(sample.job_id)
        if there is None or (there and there[0] >= sample.step):
            return  # the job has ended, or a rank further on was faster
        if pending.ready is not None:
            pending.ready.synchronize()
            # A stream of this thread's own: the copy to the host overlaps the computation.
            with torch.cuda.stream(torch.cuda.Stream(self._codec.device)):
                self._write_finite(sample)
        else:
            self._write_finite(sample)

    def _write_finite(self, sample: Sample) -> None:
        latents: Tensor = sample.tensors["latents"]
        # Between two steps of a stage nobody has looked yet; what is broken is not worth going on with.
        if bool(torch.isfinite(latents.sum(dtype=torch.float32))):
            self._store.write(sample.job_id, sample.step, self._codec.encode(sample))
