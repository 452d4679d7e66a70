"""How often a rank died while it worked on a job, counted in Redis, and when that job is set aside.

A rank that dies leaves up to three suspects (`crash_marker`), and several ranks may die at once; only one of the jobs
is the cause. The rule that blames it and no other:

1. Each suspect is counted once a crash, with the place (phase and step) where it was.
2. A job that has been counted runs alone: its group begins it when nothing else is in flight, and begins nothing else,
   not even a photo, until it has ended. So when it is the cause, it is the only suspect of the next crash.
3. A job is set aside when it was the only suspect at its last crash and has been counted `max_attempts` times in a row
   at the same place, or five times as often at different places.

A job that always kills its rank at one place is set aside after `max_attempts` restarts, or two if that is more. A job
that was only next to it finishes alone and is forgotten here.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import redis
import rq
from pydantic import TypeAdapter, ValidationError

from svdq.producer import keys
from svdq.worker.health.crash_marker import CrashSuspect, Phase

logger = logging.getLogger(__name__)

#: How many times `max_attempts` a job may end its rank at different places.
MAX_CRASHES_FACTOR = 5


@dataclass(frozen=True, kw_only=True)
class CrashCount:
    """How often a rank died while it worked on a job."""

    #: What was being done at the last crash.
    phase: Phase
    #: The index of the denoising step then; 0 in other phases.
    step: int
    #: The rank that died last.
    rank: int
    #: Crashes in a row at that place: without progress.
    here: int
    #: Crashes at any place.
    total: int
    #: The worker that had the job at the last crash; "" when it was only prepared ahead.
    worker: str
    #: Whether it was the only suspect at the last crash.
    only_suspect: bool
    #: Whether the last one was no crash: the rank ended itself because the step made no progress.
    stalled: bool = False

    @classmethod
    def after(
        cls, before: "CrashCount | None", suspect: CrashSuspect, *, worker: str, only_suspect: bool
    ) -> "CrashCount":
        """Count one more; a job that came to another place than last time has made progress."""
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
        """Say why the job was set aside, and what can be done."""
        times = "once" if self.total == 1 else f"{self.total} times"
        where = f"last rank {self.rank} {_place(self.phase, self.step)}"
        if self.stalled:
            return (
                f"Its worker process made no progress and was ended {times} while it computed this job, {where}, so it "
                "was set aside and the queue goes on. That is mostly a GPU or a driver that hangs: look at the "
                "worker's log (`svdq logs`), which says where it stood, then `svdq retry` it; if a step may take that "
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
    """Count one crash against its suspects; on each host of a group, before its ranks meet and so before any pop."""
    for suspect in suspects:
        status, name = connection.hmget(rq.job.Job.key_for(suspect.job_id), "status", "worker_name")
        before, worker = read_count(connection, suspect.job_id), _text(name)
        # A worker's name is used once, so another host of the group has counted this crash.
        is_counted = before is not None and worker != "" and before.worker == worker
        if status is not None and not is_counted:
            count = CrashCount.after(before, suspect, worker=worker, only_suspect=len(suspects) == 1)
            connection.hset(keys.CRASHES, suspect.job_id, json.dumps(asdict(count)))
        what = "made no progress" if suspect.stalled else "died"
        place = _place(suspect.phase, suspect.step)
        logger.warning("Rank %d %s %s, job %s.", suspect.rank, what, place, suspect.job_id)


def _text(name: bytes | str | None) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name or ""


def read_count(connection: redis.Redis, job_id: str) -> CrashCount | None:
    """Return what was counted of a job; None for nothing, or nothing that can be read."""
    text = connection.hget(keys.CRASHES, job_id)
    try:
        return _COUNT.validate_json(text) if text else None
    except ValidationError:
        return None  # of another version


def must_run_alone(connection: redis.Redis, job_id: str) -> bool:
    """Whether a job was a suspect and has not ended since."""
    return bool(connection.hexists(keys.CRASHES, job_id))


def _place(phase: Phase, step: int) -> str:
    match phase:
        case "prepare":
            return "while it prepared the photo"
        case "encode":
            return "while it encoded the photo"
        case "warm-up":
            return "while it warmed up for this size"
        case "step":
            return f"in step {step + 1}"
        case "decode":
            return "while it decoded the frames"
        case "write":
            return "while it wrote the files"
