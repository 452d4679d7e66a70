"""The frames in a file, and the frames that an undisturbed run puts there."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import av
import numpy as np
import torch
from PIL import Image, ImageSequence

from svdq.pipeline.media.video import write_video
from svdq.pipeline.models.resolved_model import Timings
from svdq.pipeline.models.simulated import SimulatedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.video_parameters import Format
from svdq.producer.job import Job


def read_frames(path: Path) -> np.ndarray:
    """Decode a file, or a folder of png files, to its end: (F, H, W, 3), uint8.

    Raises:
        OSError, ValueError: it cannot be decoded (FFmpegError is an OSError or a ValueError).
    """
    if path.is_dir():
        return np.stack([np.asarray(Image.open(frame).convert("RGB")) for frame in sorted(path.glob("*.png"))])
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


class Reference(Protocol):
    """Knows what undisturbed runs make."""

    def frames(self, job: Job, kind: Format) -> np.ndarray:
        """Give the frames that must be in a job's file of that kind: (F, H, W, 3), uint8."""
        ...


class SimulatedReference:
    """Runs the simulated model here and writes its frames as the worker does: an undisturbed run without a worker."""

    def __init__(self, folder: Path, job_of: Callable[[str], Job]) -> None:
        """Make it.

        Args:
            folder: an existing one, for files of its own.
            job_of: gives a job by its id.
        """
        self._folder = folder
        self._job_of = job_of
        self._model = SimulatedModel(Timings(step_ms=0), Role.of_rank(0), torch.device("cpu"))
        #: What was decoded from what was written, by the frames' bytes and the kind of file.
        self._decoded: dict[tuple[bytes, Format], np.ndarray] = {}

    def frames(self, job: Job, kind: Format) -> np.ndarray:
        """Encode, do every step, decode, write, read; of a later link of a chain, put them behind those before it."""
        parameters = job.parameters
        tensors = self._model.encode(None, parameters)
        denoiser = self._model.denoiser(tensors, parameters)
        for index in range(parameters.steps):
            tensors = {**tensors, **denoiser.step(tensors, index)}
        frames = self._model.decode(tensors, parameters, parameters.num_frames).numpy()
        if job.predecessor:
            frames = frames[1:]
        key = (frames.tobytes(), kind)
        if key not in self._decoded:
            path = self._folder / (f"{len(self._decoded)}" if kind == "png" else f"{len(self._decoded)}.{kind}")
            write_video(frames, path, kind, job.fps, "reference")
            self._decoded[key] = read_frames(path)
        if job.predecessor:
            return np.concatenate([self.frames(self._job_of(job.predecessor), kind), self._decoded[key]])
        return self._decoded[key]


class RecordedReference:
    """The frames of an undisturbed campaign with the same seeds."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, Format], np.ndarray] = {}

    def record(self, job: Job, kind: Format, path: Path) -> None:
        """Keep what a file holds."""
        self._frames[job.seed, kind] = read_frames(path)

    def frames(self, job: Job, kind: Format) -> np.ndarray:
        """Look it up."""
        return self._frames[job.seed, kind]
