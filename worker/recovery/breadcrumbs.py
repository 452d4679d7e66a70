"""Who was computing what when a rank died: each rank leaves a record of 128 bytes that outlives it. Knows no Redis.

A rank that ends in order, is told to stop or loses a neighbour says so; one that is killed, or dies of what it
computes, cannot. So after a restart the record without that mark names the job to blame; its neighbours are innocent.
A rank that ends because a step of it did not leaves a mark of its own.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from svdq.worker.identity import process_is_gone

#: Bytes of a record: `<rank> <step> <job id>` up to the last byte, which is the mark.
RECORD_BYTES = 128
#: The mark of a rank that ended for a reason that is no job's.
INNOCENT = b"i"
#: The mark of a rank that ended itself because it made no progress.
STALLED = b"s"
_NOTHING = b" " * (RECORD_BYTES - 1)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The job during whose step a rank died."""

    #: Id of the job.
    job_id: str
    #: The step that was being computed; the number of steps means the decode.
    step: int
    #: The rank that died.
    rank: int
    #: Whether it ended itself because the step did not end.
    stalled: bool = False


class Breadcrumbs:
    """The record of one rank in one life of its group."""

    def __init__(self, folder: Path, life: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.life = life
        self._rank = rank
        self._file = os.open(_path(folder, life, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self._file, _NOTHING + b" ", 0)

    def step(self, job_id: str, index: int) -> None:
        """Note what is about to be computed: one write of a page that outlives the process, some microseconds."""
        record = f"{self._rank} {index} {job_id}".encode()
        # An id that does not fit is nobody's of ours; a part of it would be somebody else's.
        os.pwrite(self._file, record.ljust(len(_NOTHING)) if len(record) <= len(_NOTHING) else _NOTHING, 0)

    def idle(self) -> None:
        """Note that nothing is being computed."""
        os.pwrite(self._file, _NOTHING, 0)

    def innocent(self) -> None:
        """Note that this rank ends for a reason that is no job's; from any thread."""
        os.pwrite(self._file, INNOCENT, RECORD_BYTES - 1)  # a byte of its own: no note that comes late undoes it

    def stalled(self) -> None:
        """Note that this rank ends because the step that it noted last makes no progress; from any thread."""
        os.pwrite(self._file, STALLED, RECORD_BYTES - 1)


def read_blame(folder: Path, life: int) -> Blame | None:
    """Say which job the life before this one died of, if it is known, and remove its records.

    Only when exactly one rank died without a word: when all were killed, it was no job's doing.
    """
    records = [_read(path) for path in sorted(folder.glob(f"life{life - 1}.rank*"))]
    for path in folder.glob("life*.rank*"):
        if not path.name.startswith(f"life{life}."):
            path.unlink(missing_ok=True)
    guilty = [record for record in records if record[RECORD_BYTES - 1 :] != INNOCENT]
    if len(guilty) != 1:
        return None
    words = guilty[0][: RECORD_BYTES - 1].decode().split()
    if len(words) != 3:
        return None
    stalled = guilty[0][RECORD_BYTES - 1 :] == STALLED
    return Blame(rank=int(words[0]), step=int(words[1]), job_id=words[2], stalled=stalled)


def folder_without_launcher(home: Path) -> Path:
    """Make the folder of a group that a plain torchrun has started: its process is the parent of all its ranks."""
    folder = home / "runs"
    for old in folder.glob("*"):
        if old.name.isdigit() and process_is_gone(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    return folder / str(os.getppid())


def _path(folder: Path, life: int, rank: int) -> Path:
    return folder / f"life{life}.rank{rank}"


def _read(path: Path) -> bytes:
    return path.read_bytes()[:RECORD_BYTES]
