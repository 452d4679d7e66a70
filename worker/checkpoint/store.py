"""Stores checkpoints: a folder for each job that is in work, a safetensors file for each step.

Rank 0 makes a job's folder when it takes the job and removes it when the job has ended; ranks write only into an
existing one. A file has a sample: its tensors, and as JSON the rest, a checksum, and the model, the kind of device and
the compute options, which decide the bits.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic_core import from_json
from safetensors import SafetensorError

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.loop.sample import Sample, sample_body, sample_from
from svdq.pipeline.models.video_model import State
from svdq.pipeline.transport.message import byte_view
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.storage.storage import CHECKPOINTS, MARKER, Storage, is_checkpoint_folder

SUFFIX = ".safetensors"


class CheckpointStore:
    """Checkpoints in a storage; each method raises an UnavailableError when it cannot be used."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open(self, job_id: str) -> None:
        """Make the folder of a job, with svdq's marker, unless somebody else has one there."""
        names = self._storage.names(f"{CHECKPOINTS}/{job_id}")
        if MARKER not in names and (not names or is_checkpoint_folder(job_id, names)):
            self._storage.write_bytes(f"{CHECKPOINTS}/{job_id}/{MARKER}", b"")

    def steps(self, job_id: str) -> list[int] | None:
        """List the steps of a job's checkpoints, furthest first; None if it has no folder, since it has ended."""
        names = self._storage.names(f"{CHECKPOINTS}/{job_id}")
        stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        return sorted(map(int, filter(str.isdecimal, stems)), reverse=True) if MARKER in names else None

    def write(self, job_id: str, step: int, data: bytes) -> None:
        """Write a checkpoint, and remove those before it; nothing stays if the job ends meanwhile."""
        key = f"{CHECKPOINTS}/{job_id}/{step}{SUFFIX}"
        try:
            self._storage.write_bytes(key, data)
        except UnavailableError:
            if self.steps(job_id) is not None:
                raise  # else its folder was removed before the file had its name
        steps = self.steps(job_id)
        if steps is None:
            self._storage.remove(key)
            self.clear(job_id)
            return
        for older in steps:
            if older < step:
                self._storage.remove(f"{CHECKPOINTS}/{job_id}/{older}{SUFFIX}")

    def read(self, job_id: str, step: int) -> bytes:
        """Read a checkpoint."""
        return self._storage.read(f"{CHECKPOINTS}/{job_id}/{step}{SUFFIX}")

    def clear(self, job_id: str) -> None:
        """Remove a job's checkpoints."""
        self._storage.remove_checkpoints(job_id)

    def ages_s(self) -> dict[str, float]:
        """Return the jobs that have a folder, with the seconds since a file was written there; 0 for an empty one."""
        written_at: dict[str, datetime] = {}
        for entry in self._storage.entries(CHECKPOINTS):
            _, job_id, *rest = entry.key.split("/")
            if rest:
                written_at[job_id] = max(entry.modified_at, written_at.get(job_id, entry.modified_at))
        now = datetime.now(UTC)
        # A kill leaves an empty folder where one was just made, or all but removed; its name says that it is svdq's.
        names = [name for name in self._storage.names(CHECKPOINTS) if is_checkpoint_folder(name, ())]
        return {job_id: (now - written_at.get(job_id, now)).total_seconds() for job_id in (*written_at, *names)}

    def sweep(self) -> None:
        """Remove the partial files of killed processes."""
        self._storage.sweep()


def open_checkpoint_store(where: str, home: Path, storage: Storage) -> CheckpointStore | None:
    """Choose where checkpoints are stored: `where` is local, storage or off."""
    if where == "off":
        return None
    return CheckpointStore(Storage(str(home)) if where == "local" else storage)


FORMAT = 2  # changes with the content of checkpoints; a job whose checkpoint has another format starts anew


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Writes samples as bytes and reads them back."""

    model: str
    device: torch.device  # where decoded tensors go
    compute: dict[str, Any] = field(default_factory=dict)  # how the model computes: `ModelInfo.compute`

    def encode(self, sample: Sample) -> bytes:
        """Write a sample; its tensors are copied to the host."""
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sample.tensors.items()}
        document = {"made_with": self._made_with, "sample": sample_body(sample), "crc32": _checksum(tensors)}
        return safetensors.torch.save(tensors, {"svdq": json.dumps(document, allow_nan=False)})

    def decode(self, data: bytes, job_id: str, parameters: VideoParameters) -> Sample:
        """Read a sample of a job; raise a ValueError if it is not one, or was made in another way."""
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
        return replace(sample, tensors={name: each.to(self.device) for name, each in tensors.items()})

    @property
    def _made_with(self) -> dict[str, Any]:
        return {"format": FORMAT, "model": self.model, "device": self.device.type} | self.compute


def _checksum(tensors: State) -> int:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(byte_view(tensors[name]), checksum)
    return checksum


def _words(made_with: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_with.items())
