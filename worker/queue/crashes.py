"""Finds out which job made a rank die, and counts in Redis how often, to set it aside.

Each rank records in a small file, in a slot for each thread, the jobs that its stage loop, its preparing thread and its
writing threads work on. A rank that ends normally, is stopped by a signal or loses a neighbor marks its exit as clean.
After a restart the slots of ranks without that mark name the suspects. If a rank ended itself because a step made no
progress, only the job of its stage loop is one.

1. Each suspect is counted once for each crash, with its place (phase and step).
2. A job that has been counted runs alone: its group begins it when nothing else is in flight, and begins nothing else,
   not even a photo, until it has ended. So if it is the cause, it is the only suspect of the next crash.
3. A job is set aside when it was the only suspect at its last crash and has been counted `max_attempts` times in a row
   at the same place, or five times as often at different places.
"""

import contextlib
import logging
import os
import queue
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import redis
from pydantic import TypeAdapter, ValidationError

from svdq.pipeline.loop.sample import Sample
from svdq.producer import keys
from svdq.producer.processes import is_gone, process_name
from svdq.producer.queue import ENDED, statuses

logger = logging.getLogger(__name__)

Phase = Literal["prepare", "encode", "warm-up", "step", "decode", "write"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MAX_WRITERS = 8  # videos that a rank may write at the same time
MAX_ID_LENGTH = 120  # longest id of a job, in characters
SLOT_BYTES = MAX_ID_LENGTH + 24  # `<phase> <step> <job id>`; ten in a file, and a byte for the kind of exit
RECORD_BYTES = (2 + MAX_WRITERS) * SLOT_BYTES + 1
_STAGE_LOOP = 0
_SLOTS_OF = {"prepare": range(1, 2), "write": range(2, 2 + MAX_WRITERS)}
_CLEAN = b"c"
_STALLED = b"s"

MAX_CRASHES_FACTOR = 5  # a job may end its rank this many times as often at different places

_PLACES: dict[Phase, str] = {
    "prepare": "while it prepared the photo",
    "encode": "while it encoded the photo",
    "warm-up": "while it warmed up for this size",
    "step": "in step {}",
    "decode": "while it decoded the frames",
    "write": "while it wrote the files",
}


@dataclass(frozen=True, kw_only=True)
class CrashSuspect:
    """A job that a rank was working on when it died."""

    job_id: str
    phase: Phase
    step: int = 0  # of the denoising; 0 in all phases before, the number of steps in a decode
    rank: int
    stalled: bool = False  # whether the rank ended itself because this made no progress

    @property
    def place(self) -> str:
        """Where the rank died, as the end of a sentence."""
        return _PLACES[self.phase].format(self.step + 1)


def phase_of(sample: Sample, index: int) -> Literal["encode", "step", "decode"]:
    """Return what a rank does that reports a step; before its photo is encoded, a sample has no tensors."""
    return "decode" if index == sample.parameters.steps else "encode" if sample.step < 0 else "step"


class CrashMarker:
    """The record of one rank, for one start of its group."""

    def __init__(self, folder: Path, restart_count: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.restart_count = restart_count
        path = folder / f"restart{restart_count}.rank{rank}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self._file, b" " * RECORD_BYTES, 0)
        self._free: dict[str, queue.SimpleQueue[int]] = {phase: queue.SimpleQueue() for phase in _SLOTS_OF}
        for phase, slots in _SLOTS_OF.items():
            for slot in slots:
                self._free[phase].put(slot)

    def begin(self, phase: Phase, job_id: str, step: int = 0) -> None:
        """Record the phase of the stage loop: one write to the page cache, a few microseconds."""
        self._write(_STAGE_LOOP, f"{phase} {step} {job_id}")

    def idle(self) -> None:
        """Record that the stage loop computes nothing."""
        self._write(_STAGE_LOOP, "")

    @contextlib.contextmanager
    def during(self, phase: Literal["prepare", "write"], job_id: str) -> Iterator[None]:
        """Record a phase of a job for the block; waits while all slots of the phase are in use."""
        free = self._free[phase]
        slot = free.get()
        try:
            self._write(slot, f"{phase} 0 {job_id}")
            yield
        finally:
            self._write(slot, "")
            free.put(slot)

    def mark_clean_exit(self) -> None:
        """Record that no job is the cause of the end of this rank; from any thread."""
        # A separate byte: writing a slot later does not undo it.
        self._put(_CLEAN, RECORD_BYTES - 1)

    def mark_stalled(self) -> None:
        """Record that this rank ends because its stage loop makes no progress; from any thread."""
        self._put(_STALLED, RECORD_BYTES - 1)

    def _write(self, slot: int, text: str) -> None:
        record = text.encode()
        # A part of a longer id could be the id of another job.
        self._put((record if len(record) <= SLOT_BYTES else b"").ljust(SLOT_BYTES), slot * SLOT_BYTES)

    def _put(self, content: bytes, at: int) -> None:
        # A file system that copies on write refuses this when it is full, and the work goes on.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, content, at)


def read_suspects(folder: Path, restart_count: int) -> tuple[CrashSuspect, ...]:
    """Return jobs on which ranks died, each in its first phase; delete the files of starts but `restart_count`."""
    suspects: dict[str, CrashSuspect] = {}
    for path in sorted(folder.glob("restart*.rank*")):
        if path.name.startswith(f"restart{restart_count}."):
            continue
        for suspect in _suspects_in(path.read_bytes(), int(path.name.rpartition("rank")[2])):
            first = suspects.setdefault(suspect.job_id, suspect)
            if PHASES.index(suspect.phase) < PHASES.index(first.phase):
                suspects[suspect.job_id] = suspect
        path.unlink(missing_ok=True)
    return tuple(suspects.values())


def _suspects_in(record: bytes, rank: int) -> Iterator[CrashSuspect]:
    mark = record[RECORD_BYTES - 1 :]
    if len(record) != RECORD_BYTES or mark == _CLEAN:
        return
    slots = [record[start : start + SLOT_BYTES] for start in range(0, RECORD_BYTES - 1, SLOT_BYTES)]
    for slot in slots[: _STAGE_LOOP + 1] if mark == _STALLED else slots:
        words = slot.decode(errors="replace").split()
        phase = next((phase for phase in PHASES if words[:1] == [phase]), None)
        if phase is not None and len(words) == 3:
            yield CrashSuspect(job_id=words[2], phase=phase, step=int(words[1]), rank=rank, stalled=mark == _STALLED)


def folder_without_launcher(home: Path) -> Path:
    """Return the folder of a group that plain torchrun, its parent, has started; remove folders of ended torchruns."""
    folder = home / "runs"
    for old in folder.glob("*"):
        if is_gone(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return folder / process_name(os.getppid(), "torchrun")


@dataclass(frozen=True, kw_only=True)
class CrashCount:
    """How often a rank died while it worked on a job: a record in Redis."""

    last: CrashSuspect
    #: Number of crashes in a row at that place, and at any place.
    here: int
    total: int
    only_suspect: bool

    @classmethod
    def after(cls, before: "CrashCount | None", suspect: CrashSuspect, *, only_suspect: bool) -> "CrashCount":
        """Return the count after one more crash; a crash at another place means that the job made progress."""
        here = total = 1
        if before is not None:
            total += before.total
            if (before.last.phase, before.last.step) == (suspect.phase, suspect.step):
                here += before.here
        return cls(last=suspect, here=here, total=total, only_suspect=only_suspect)

    def is_too_many(self, max_attempts: int) -> bool:
        """Whether the job is to be set aside."""
        return self.only_suspect and (self.here >= max_attempts or self.total >= max_attempts * MAX_CRASHES_FACTOR)

    @property
    def reason(self) -> str:
        """Why the job was set aside, and how the user can go on."""
        times = "once" if self.total == 1 else f"{self.total} times"
        where = f"last rank {self.last.rank} {self.last.place}"
        if self.last.stalled:
            return (
                f"Its worker process made no progress and was ended {times} while it computed this job, {where}, so it "
                "was set aside and the queue goes on. That is mostly a GPU or a driver that hangs: look at the "
                "worker's log (`svdq logs`), which has its stack, then `svdq retry` it; if a step may take that "
                "long here, raise SVDQ_STALL_S."
            )
        if self.last.phase == "prepare":
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
    """Count one crash for its suspects that another group has not ended meanwhile, before the group takes jobs."""
    for suspect in suspects:
        [status] = statuses(connection, [suspect.job_id])
        if status not in (None, *ENDED):
            before = read_count(connection, suspect.job_id)
            count = CrashCount.after(before, suspect, only_suspect=len(suspects) == 1)
            connection.hset(keys.CRASHES, suspect.job_id, _COUNT.dump_json(count))
        what = "made no progress" if suspect.stalled else "died"
        logger.warning("Rank %d %s %s, job %s.", suspect.rank, what, suspect.place, suspect.job_id)


def read_count(connection: redis.Redis, job_id: str) -> CrashCount | None:
    """Return the count of a job; None if there is none that can be read."""
    text = connection.hget(keys.CRASHES, job_id)
    try:
        return _COUNT.validate_json(text) if text else None
    except ValidationError:
        return None  # of another version
