"""Checkpoints as bytes, and where they are kept: a folder for each job, a file for each step.

Rank 0 makes a job's folder when it takes the job and removes it when the job has ended. On disk, ranks write only into
an existing folder, so a slow rank leaves nothing behind after the end of a job.
Every method of a store raises OSError or UnavailableError when the disk or the storage cannot be used.

A checkpoint is a sample in a safetensors file. The tensors are stored unchanged. The metadata is JSON: the sample
without its tensors, a checksum of the tensors, and the model, the kind of device and the compute options, all of which
decide the bits.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic_core import from_json
from safetensors import SafetensorError

from svdq.pipeline.loop.sample import Sample, sample_body, sample_from
from svdq.pipeline.models.video_model import State
from svdq.pipeline.transport.message import byte_views
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.files import open_regular
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


#: Changes with the content of checkpoints; a job whose checkpoint has another format starts anew.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Writes samples as bytes and reads them back."""

    #: The model's name.
    model: str
    #: Where decoded tensors go.
    device: torch.device
    #: How the model computes: `ModelInfo.compute`.
    compute: dict[str, Any] = field(default_factory=dict)
    #: Raises ValueError if tensors are no state of a video: `VideoModel.check_state`.
    check_state: Callable[[State, VideoParameters], None] = lambda state, parameters: None

    def encode(self, sample: Sample) -> bytes:
        """Write a sample; its tensors are copied to the host."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sample.tensors.items()}
        document = {"made_with": self._made_with, "sample": sample_body(sample), "crc32": _checksum(tensors)}
        return safetensors.torch.save(tensors, {"svdq": json.dumps(document, allow_nan=False)})

    def decode(self, data: bytes, job_id: str, parameters: VideoParameters) -> Sample:
        """Read a sample of a job.

        Raises:
            ValueError: it is not one, or was made by another model, with other parameters or in another way.
        """
        try:
            length = int.from_bytes(data[:8], "little")
            document = from_json(from_json(data[8 : 8 + length])["__metadata__"]["svdq"])
            tensors = safetensors.torch.load(data)
            sample = sample_from(document["sample"], tensors)
            made_with = dict(document["made_with"])
            checksum = document["crc32"]
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"it is not a checkpoint of this version: {error!r}") from error
        # The decode_chunk_size that was chosen at the start of the video stays.
        ours = {"decode_chunk_size": sample.parameters.decode_chunk_size}
        if (sample.job_id, sample.parameters) != (job_id, parameters.model_copy(update=ours)):
            raise ValueError("it was made with other parameters")
        if made_with != self._made_with:
            raise ValueError(f"it was made with {_words(made_with)}, and now it is {_words(self._made_with)}")
        if _checksum(tensors) != checksum:
            raise ValueError("its checksum is wrong")
        self.check_state(tensors, sample.parameters)
        return replace(sample, tensors={name: each.to(self.device) for name, each in tensors.items()})

    @property
    def _made_with(self) -> dict[str, Any]:
        """The model, and how it computes, which decide the bits."""
        return {"format": FORMAT, "model": self.model, "device": self.device.type} | self.compute


def _checksum(tensors: State) -> int:
    """Return the CRC-32 of host tensors in the order of their names."""
    checksum = 0
    for view in byte_views(dict(sorted(tensors.items()))):
        checksum = zlib.crc32(view, checksum)
    return checksum


def _words(made_with: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_with.items())
