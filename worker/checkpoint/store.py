"""Stores opaque checkpoint blobs: a folder for each job, a file for each step, on this machine or in the storage.

Rank 0 makes a job's folder when it takes the job and removes it when the job has ended. On disk, ranks write only into
an existing folder, so a slow rank leaves nothing behind after the end of a job.
Every method raises OSError or UnavailableError when the disk or the storage cannot be used.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from svdq.producer.regular_file import open_regular
from svdq.producer.storage.local import check_room
from svdq.producer.storage.storage import MARKER, Storage, is_checkpoint_folder

#: Suffix of a checkpoint's file name; the stem is the step.
SUFFIX = ".safetensors"
#: Folder under SVDQ_HOME or in the storage.
FOLDER = "checkpoints"
#: Name of a job's folder that is being removed.
_ASIDE = re.compile(r"\.(?P<job_id>.+)-[0-9a-f]{8}")


class FolderCheckpointStore:
    """Checkpoints in a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, job_id: str) -> None:
        """Make a folder for a job's checkpoints, with svdq's marker, if there is none."""
        with contextlib.suppress(FileExistsError):
            (self._folder / job_id).mkdir(parents=True)
            (self._folder / job_id / MARKER).touch()

    def steps(self, job_id: str) -> list[int] | None:
        """List the steps of the checkpoints, furthest first; None if the job has no folder, since it has ended."""
        try:
            return _steps(os.listdir(self._folder / job_id))
        except FileNotFoundError:
            return None

    def write(self, job_id: str, step: int, data: bytes) -> None:
        """Write a checkpoint under a temporary name, flush, rename, and remove those before it.

        Does nothing if the folder was removed meanwhile.
        """
        folder = self._folder / job_id
        check_room(self._folder)
        temporary = folder / f".{step}-{secrets.token_hex(4)}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / f"{step}{SUFFIX}")
        except FileNotFoundError:
            return  # the job has ended
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        for older in self.steps(job_id) or ():
            if older < step:
                (folder / f"{older}{SUFFIX}").unlink(missing_ok=True)

    def read(self, job_id: str, step: int) -> bytes:
        """Read a checkpoint."""
        with open_regular(self._folder / job_id / f"{step}{SUFFIX}", os.O_NOFOLLOW) as file:
            return file.read()

    def clear(self, job_id: str) -> None:
        """Rename the folder, so that no rank writes into it any more, then remove it."""
        aside = self._folder / f".{job_id}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            if is_checkpoint_folder(job_id, os.listdir(self._folder / job_id)):
                (self._folder / job_id).rename(aside)
                shutil.rmtree(aside)

    def ages_s(self) -> dict[str, float]:
        """Return the jobs that have a folder, with the seconds since it changed; remove what a `clear` left."""
        ages_s = {}
        now = time.time()
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another group's job has just ended
                files = os.listdir(path)
                aside = _ASIDE.fullmatch(path.name)
                if aside is not None and is_checkpoint_folder(aside["job_id"], files):
                    shutil.rmtree(path, ignore_errors=True)
                elif is_checkpoint_folder(path.name, files):
                    ages_s[path.name] = now - path.stat().st_mtime
        return ages_s


class ObjectCheckpointStore:
    """Checkpoints in an object store, which has no folders and no partial files.

    A checkpoint that a slow rank writes after a job's end stays until the group's next sweep.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open(self, job_id: str) -> None:
        """Object stores need no folders."""

    def steps(self, job_id: str) -> list[int] | None:
        """List the job's objects."""
        return _steps(self._storage.names(f"{FOLDER}/{job_id}"))

    def write(self, job_id: str, step: int, data: bytes) -> None:
        """Write the object, with the marker beside the first of a job, then remove those before it."""
        there = self.steps(job_id)
        if not there:
            self._storage.write_bytes(f"{FOLDER}/{job_id}/{MARKER}", b"")
        self._storage.write_bytes(f"{FOLDER}/{job_id}/{step}{SUFFIX}", bytes(data))
        for older in there or ():
            if older < step:
                self._storage.remove(f"{FOLDER}/{job_id}/{older}{SUFFIX}")

    def read(self, job_id: str, step: int) -> bytes:
        """Read the object."""
        return self._storage.read(f"{FOLDER}/{job_id}/{step}{SUFFIX}")

    def clear(self, job_id: str) -> None:
        """Remove the job's objects."""
        if is_checkpoint_folder(job_id, self._storage.names(f"{FOLDER}/{job_id}")):
            self._storage.remove(f"{FOLDER}/{job_id}")

    def ages_s(self) -> dict[str, float]:
        """List the jobs; not all object stores have times, so all count as new."""
        return dict.fromkeys(self._storage.names(FOLDER), 0.0)


CheckpointStore = FolderCheckpointStore | ObjectCheckpointStore


def open_checkpoint_store(where: str, home: Path, storage: Storage) -> CheckpointStore | None:
    """Choose where checkpoints are stored: `where` is local, storage or off."""
    if where == "off":
        return None
    if where == "local":
        return FolderCheckpointStore(home / FOLDER)
    return FolderCheckpointStore(storage.folder / FOLDER) if storage.folder else ObjectCheckpointStore(storage)


def _steps(names: list[str]) -> list[int]:
    stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
    return sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True)
