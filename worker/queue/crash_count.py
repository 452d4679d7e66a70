"""Counts in Redis how often a rank died while it worked on a job, and decides when that job is set aside.

A rank that dies leaves up to three suspects (`health/crash_marker.py`), and several ranks may die at once; only one of
the jobs is the cause. The rule that blames only that job:

1. Each suspect is counted once for each crash, with its place (phase and step).
2. A job that has been counted runs alone: its group begins it when nothing else is in flight, and begins nothing else,
   not even a photo, until it has ended. So if it is the cause, it is the only suspect of the next crash.
3. A job is set aside when it was the only suspect at its last crash and has been counted `max_attempts` times in a row
   at the same place, or five times as often at different places.

A job that always kills its rank at one place is set aside after `max_attempts` restarts, or two if that is more. The
other suspects finish alone, and their counts are deleted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import redis
from pydantic import TypeAdapter, ValidationError

from svdq.producer import keys
from svdq.producer.untrusted_job import key_of
from svdq.worker.health.crash_marker import CrashSuspect, Phase
from svdq.worker.queue.scripts import text_of

logger = logging.getLogger(__name__)

#: A job may end its rank this many times `max_attempts` at different places.
MAX_CRASHES_FACTOR = 5

#: How a sentence names the place of a crash.
_PLACES: dict[Phase, str] = {
    "prepare": "while it prepared the photo",
    "encode": "while it encoded the photo",
    "warm-up": "while it warmed up for this size",
    "step": "in step {}",
    "decode": "while it decoded the frames",
    "write": "while it wrote the files",
}


@dataclass(frozen=True, kw_only=True)
class CrashCount:
    """How often a rank died while it worked on a job."""

    #: The phase at the last crash.
    phase: Phase
    #: The index of the denoising step then; 0 in other phases.
    step: int
    #: The rank that died last.
    rank: int
    #: Number of crashes in a row at that place.
    here: int
    #: Number of crashes at any place.
    total: int
    #: The worker that had the job at the last crash; "" if only its photo was prepared.
    worker: str
    #: Whether it was the only suspect at the last crash.
    only_suspect: bool
    #: Whether the rank ended itself the last time because the step made no progress.
    stalled: bool = False

    @classmethod
    def after(
        cls, before: "CrashCount | None", suspect: CrashSuspect, *, worker: str, only_suspect: bool
    ) -> "CrashCount":
        """Return the count after one more crash; a crash at another place means that the job made progress."""
        is_same_place = before is not None and (before.phase, before.step) == (suspect.phase, suspect.step)
        return cls(
            phase=suspect.phase,
            step=suspect.step,
            rank=suspect.rank,
            here=before.here + 1 if before is not None and is_same_place else 1,
            total=before.total + 1 if before is not None else 1,
            worker=worker,
            only_suspect=only_suspect,
            stalled=suspect.stalled,
        )

    def is_too_many(self, max_attempts: int) -> bool:
        """Whether the job is to be set aside."""
        return self.only_suspect and (self.here >= max_attempts or self.total >= max_attempts * MAX_CRASHES_FACTOR)

    @property
    def reason(self) -> str:
        """Why the job was set aside, and what the user can do."""
        times = "once" if self.total == 1 else f"{self.total} times"
        where = f"last rank {self.rank} {_PLACES[self.phase].format(self.step + 1)}"
        if self.stalled:
            return (
                f"Its worker process made no progress and was ended {times} while it computed this job, {where}, so it "
                "was set aside and the queue goes on. That is mostly a GPU or a driver that hangs: look at the "
                "worker's log (`svdq logs`), which has its stack, then `svdq retry` it; if a step may take that "
                "long here, raise SVDQ_STALL_S."
            )
        if self.phase == "prepare":
            hint = "The photo probably crashes its decoder or needs too much memory: export it anew and submit that."
        else:
            hint = (
                "That is mostly memory running out or a crash of the GPU's driver: look at the system's log, then try "
                "fewer frames, a smaller size or a smaller decode_chunk_size, or `svdq retry` it."
            )
        return (
            f"Its worker process died {times} while it worked on this job, {where}, so it was set aside and the queue "
            f"goes on. {hint}"
        )


_COUNT = TypeAdapter(CrashCount)


def count_crash(connection: redis.Redis, suspects: Sequence[CrashSuspect]) -> None:
    """Count one crash for its suspects. Each host of a group does this before its ranks connect, so before any pop."""
    for suspect in suspects:
        status, name = connection.hmget(key_of(suspect.job_id), "status", "worker_name")
        before, worker = read_count(connection, suspect.job_id), text_of(name)
        # Worker names are unique, so another host of the group has counted this crash.
        is_counted = before is not None and worker != "" and before.worker == worker
        if status is not None and not is_counted:
            count = CrashCount.after(before, suspect, worker=worker, only_suspect=len(suspects) == 1)
            connection.hset(keys.CRASHES, suspect.job_id, _COUNT.dump_json(count))
        what = "made no progress" if suspect.stalled else "died"
        place = _PLACES[suspect.phase].format(suspect.step + 1)
        logger.warning("Rank %d %s %s, job %s.", suspect.rank, what, place, suspect.job_id)


def read_count(connection: redis.Redis, job_id: str) -> CrashCount | None:
    """Return the count of a job; None if there is none that can be read."""
    text = connection.hget(keys.CRASHES, job_id)
    try:
        return _COUNT.validate_json(text) if text else None
    except ValidationError:
        return None  # of another version


def must_run_alone(connection: redis.Redis, job_id: str) -> bool:
    """Whether a job was a suspect and has not ended since."""
    return bool(connection.hexists(keys.CRASHES, job_id))
