"""Records which jobs a rank works on in a small file that outlives its process. Does not import Redis.

Several threads of a rank work on jobs at the same time: the stage loop (encode, warm-up, step, decode), the thread
that prepares photos and those that write files. Each has its own slot in the file and writes its job and phase there
before it begins. A rank that ends normally, is stopped by a signal or loses a neighbor marks its exit as clean; a rank
that is killed or crashes cannot. So after a restart the slots of ranks without that mark name the suspects. A rank
that ends itself because a step makes no progress marks that, and then only its stage loop's job is a suspect.
`queue/crash_count.py` counts the crashes.
"""

import contextlib
import os
import queue
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from svdq.pipeline.loop.sample import Sample
from svdq.producer.processes import is_gone, process_name

#: The phases of a job, in order.
Phase = Literal["prepare", "encode", "warm-up", "step", "decode", "write"]
PHASES: tuple[Phase, ...] = get_args(Phase)

#: Videos that a rank may write at the same time.
MAX_WRITERS = 8
#: Longest id of a job, in characters; a worker refuses longer ones, which no slot could name.
MAX_ID_LENGTH = 120
#: Bytes of a slot, `<phase> <step> <job id>`; the file has ten slots and one byte for the kind of exit.
SLOT_BYTES = MAX_ID_LENGTH + 24
RECORD_BYTES = (2 + MAX_WRITERS) * SLOT_BYTES + 1
_EMPTY = b" " * SLOT_BYTES
_STAGE_LOOP = 0
_SLOTS_OF = {"prepare": range(1, 2), "write": range(2, 2 + MAX_WRITERS)}
_CLEAN = b"c"
_STALLED = b"s"


@dataclass(frozen=True, kw_only=True)
class CrashSuspect:
    """A job that a rank was working on when it died."""

    #: Id of the job.
    job_id: str
    #: Its phase.
    phase: Phase
    #: The index of the denoising step; 0 in all phases before, the number of steps in a decode.
    step: int = 0
    #: The rank that died.
    rank: int
    #: Whether the rank ended itself because this made no progress.
    stalled: bool = False


def phase_of(sample: Sample, index: int) -> Literal["encode", "step", "decode"]:
    """Return what a rank does that reports a step; before its photo is encoded, a sample has no tensors."""
    return "decode" if index == sample.parameters.steps else "step" if sample.tensors else "encode"


class CrashMarker:
    """The file of one rank, for one start of its group."""

    def __init__(self, folder: Path, restart_count: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.restart_count = restart_count
        path = folder / f"restart{restart_count}.rank{rank}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self._file, b" " * RECORD_BYTES, 0)
        #: The slots that are free.
        self._free: dict[str, queue.SimpleQueue[int]] = {}
        for phase, slots in _SLOTS_OF.items():
            self._free[phase] = queue.SimpleQueue()
            for slot in slots:
                self._free[phase].put(slot)

    def begin(self, phase: Phase, job_id: str, step: int = 0) -> None:
        """Record what the stage loop does next: one write to the page cache, a few microseconds."""
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
        content = record.ljust(SLOT_BYTES) if len(record) <= SLOT_BYTES else _EMPTY
        self._put(content, slot * SLOT_BYTES)

    def _put(self, content: bytes, at: int) -> None:
        # A file system that copies on write refuses this when it is full, and the work goes on.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, content, at)


def read_suspects(folder: Path, restart_count: int) -> tuple[CrashSuspect, ...]:
    """Return the jobs that ranks of this host worked on when they died, and delete their files.

    Files of `restart_count` are those of the present processes, and stay.

    Returns:
        One entry for each job, even if several ranks died while they warmed up for it.
    """
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


def folder_without_launcher(home: Path) -> Path:
    """Return the folder of a group that plain torchrun has started, the parent process of all its ranks.

    Removes the folders of torchruns that have ended.
    """
    folder = home / "runs"
    for old in folder.glob("*"):
        if is_gone(old.name):
            shutil.rmtree(old, ignore_errors=True)
    return folder / process_name(os.getppid(), "torchrun")


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
