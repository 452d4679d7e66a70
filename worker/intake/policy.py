"""How a group takes jobs, and when it takes no more: shortly before `--until`, and after jobs that fail alike. Pure."""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from svdq.pipeline.parameters import VideoParameters
from svdq.worker.intake.memory_plan import MemoryPlan
from svdq.worker.queue.crashes import CrashSuspect

#: Different jobs that fail alike before the breaker opens.
LENGTH = 3

_ID = re.compile(r"\b(?=\w*\d)[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True, kw_only=True)
class IntakeOptions:
    """How a group takes jobs."""

    #: End when the queue is empty.
    burst: bool = False
    #: Largest number of pixels of a photo.
    max_pixels: int = 100_000_000
    #: Seconds since the epoch at which the group is stopped; videos that would not be done by then are not started.
    until_s: float | None = None
    #: Fills in what a job leaves open with the model's defaults; raises InputError for a video that it cannot make.
    complete: Callable[[VideoParameters], VideoParameters] = lambda parameters: parameters
    #: Decides which videos fit into memory; None admits all.
    memory: MemoryPlan | None = None
    #: Number of crashes of a rank after which the job it computes is set aside.
    max_attempts: int = 2
    #: Most jobs in flight at once. Sockets limit the bytes that wait between ranks; without this limit a group with
    #: small samples could take the whole queue while its last rank waits for a slow disk.
    max_in_flight: int = 25
    #: What ranks of this host were working on when this group crashed.
    suspects: Sequence[CrashSuspect] = ()
    #: Called with a job's id; records during a block that the photo of the job is being prepared.
    mark_prepare: Callable[[str], AbstractContextManager[object]] = nullcontext


def is_too_late(now_s: float, until_s: float | None, latencies_s: Collection[float]) -> bool:
    """Whether a video that starts now would not be done in time, judged by the seconds that the last ones took.

    Times are seconds since the epoch. Before the first video has ended, a video counts as taking no time.
    """
    return until_s is not None and now_s + (median(latencies_s) if latencies_s else 0.0) >= until_s


class CircuitBreaker:
    """Counts different jobs in a row that fail with the same kind of reason."""

    def __init__(self) -> None:
        self._kind = ""
        self._job_ids: set[str] = set()

    def record_success(self) -> None:
        """Forget the failures: a job succeeded."""
        self._job_ids.clear()

    def record_failure(self, job_id: str, reason: str) -> bool:
        """Count a failed job; return whether the limit is reached, which also resets the count."""
        kind = kind_of(reason)
        if kind != self._kind:
            self._job_ids.clear()
        self._kind = kind
        self._job_ids.add(job_id)
        if len(self._job_ids) < LENGTH:
            return False
        self._job_ids.clear()
        return True


def kind_of(reason: str) -> str:
    """Replace ids and numbers in a sentence, in which two failures of the same kind may differ."""
    return _NUMBER.sub("#", _ID.sub("#", reason))
