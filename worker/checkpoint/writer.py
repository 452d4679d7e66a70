"""Writes checkpoints in a thread beside the stage loop."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from svdq.pipeline.protocols import Checkpointer
from svdq.pipeline.sample import Sample
from svdq.producer.status.ranks import Condition
from svdq.worker.checkpoint.codec import Codec
from svdq.worker.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)

#: Bytes of samples that may wait to be written, on the rank's device. Beyond it the oldest is dropped, since the rank
#: that has that sample now writes one as well; the newest always waits.
MAX_WAITING_BYTES = 256 * 2**20
#: Seconds of rest for each second of writing, since videos need the disk and the cores, too.
REST = 4.0


@dataclass(frozen=True, kw_only=True)
class _Pending:
    sample: Sample
    #: On a GPU: when the sample's tensors are computed.
    ready: torch.cuda.Event | None


class CheckpointWriter(Checkpointer):
    """The checkpointer of one rank."""

    def __init__(
        self, store: CheckpointStore, codec: Codec, on_written: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Start the thread, which calls `on_written` with the bytes of each checkpoint."""
        self._store = store
        self._codec = codec
        self._on_written = on_written
        #: Guards the four below.
        self._changed = threading.Condition()
        #: Samples to write by job, the oldest first.
        self._waiting: dict[str, _Pending] = {}
        #: Jobs whose checkpoints are to be removed.
        self._ended: list[str] = []
        self._is_working = False
        #: Whether the rank ends, so that the thread does not rest.
        self._hurried = False
        #: Why checkpoints cannot be written at present; videos continue without.
        self.condition: Condition | None = None
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def save(self, sample: Sample) -> None:
        """Queue a sample, in place of an older one of the same job."""
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
        """Queue the removal of the checkpoints of a job that has ended."""
        with self._changed:
            self._waiting.pop(job_id, None)
            self._ended.append(job_id)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written and removed, from now on without rests; return whether it is."""
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
            except Exception as error:  # noqa: BLE001 - no video fails because of a checkpoint
                self._note(error)
            pending = None  # frees its tensors while this thread waits
            rest_s = REST * (time.monotonic() - started)
            with self._changed:
                self._changed.wait_for(lambda: self._hurried, rest_s)

    def _note(self, error: Exception) -> None:
        condition = self.condition
        if condition is None:
            logger.warning("Checkpoints cannot be written (%s); videos continue without.", error)
            condition = Condition(
                effect="Checkpoints cannot be written, videos continue without",
                reason=str(error),
                since=time.time(),
                attempts=0,
            )
        self.condition = condition.model_copy(update={"reason": str(error), "attempts": condition.attempts + 1})

    def _write(self, pending: _Pending) -> None:
        sample = pending.sample
        there = self._store.steps(sample.job_id)
        if there is None or (there and there[0] >= sample.step):
            return  # the job has ended, or a later rank was faster
        if pending.ready is not None:
            pending.ready.synchronize()
            # In its own stream, so that the copy to the host overlaps the computation.
            with torch.cuda.stream(torch.cuda.Stream(self._codec.device)):
                self._write_finite(sample)
        else:
            self._write_finite(sample)

    def _write_finite(self, sample: Sample) -> None:
        # Between two steps the stage has not checked the state yet, and a broken one is of no use.
        sums = [tensor.sum(dtype=torch.float32) for tensor in sample.tensors.values() if tensor.is_floating_point()]
        if bool(torch.isfinite(torch.stack(sums)).all()):
            data = self._codec.encode(sample)
            self._store.write(sample.job_id, sample.step, data)
            self._on_written(len(data))
