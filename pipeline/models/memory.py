"""Memory of videos: measurements, kept in a file, correct the estimates of a model family. Does not import torch."""

import contextlib
import hashlib
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping
from operator import le
from pathlib import Path
from typing import Any, Literal, get_args

from svdq.pipeline.parameters import VideoParameters

#: Activities that are estimated and measured separately.
Activity = Literal["encode", "step", "decode"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

#: Bytes of a GPU kept free for fragmentation and CUDA's context. A guess that was never measured.
RESERVE_BYTES = 500_000_000
#: Workspace of cuDNN and cuBLAS in bytes, added to estimates on GPUs until something is measured. A guess.
WORKSPACE_BYTES = 1_000_000_000
#: Factor on what the operations of a VAE hold, for the copies that cuDNN makes to convolve with channels last: they are
#: some 1.6 GB of Wan at 832x480, for whose decode ComfyUI plans 1.37 times as much. Until a card says otherwise.
VAE_COPIES = 1.4

#: Largest size ratio at which the measurement of one video corrects the estimate of another.
ALIKE = 2.0
#: Version of the file format; files of other versions are ignored.
FORMAT = 2

Shape = tuple[int, ...]
#: Bytes of an element, by torch's name of its dtype.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Length of the shape of each activity.
_NUM_SIDES = {"encode": 2, "step": 4, "decode": 4}


def size_text(num_bytes: int) -> str:
    """Format a number of bytes with one decimal."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def chunk_of(parameters: VideoParameters) -> int:
    """Return the number of frames that are decoded at a time."""
    return min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)


def shape_for(activity: Activity, parameters: VideoParameters) -> Shape:
    """Return the properties of a video that determine the memory of an activity.

    Returns:
        Width and height; for a step and a decode also frames; then for a step B, which is 2 with guidance, and for a
        decode the frames at a time.
    """
    width, height, frames = parameters.width, parameters.height, parameters.num_frames
    if activity == "encode":
        return (width, height)
    return (width, height, frames, 1 + parameters.guided if activity == "step" else chunk_of(parameters))


class ChunkLimits:
    """The decode_chunk_size that remained after larger ones ran out of memory, by pixels and frames of the video."""

    def __init__(self) -> None:
        self.limits: dict[tuple[int, int], int] = {}

    def largest(self, parameters: VideoParameters) -> int:
        """Return the largest decode_chunk_size to try: at most that to which a smaller video was reduced."""
        pixels, frames = _pixels_and_frames(parameters)
        smaller = [chunk for of, chunk in self.limits.items() if of[0] <= pixels and of[1] <= frames]
        return min([chunk_of(parameters), *smaller])

    def ran_out(self, parameters: VideoParameters, left: int) -> bool:
        """Record that chunks of more than `left` frames run out of memory; return whether that is new."""
        if self.largest(parameters.model_copy(update={"decode_chunk_size": None})) <= left:
            return False
        self.limits[_pixels_and_frames(parameters)] = left
        return True

    def fits(self, parameters: VideoParameters, chunk: int) -> bool:
        """Record that a chunk size fits, as after other processes freed memory; return whether that is new."""
        pixels, frames = _pixels_and_frames(parameters)
        wrong = [of for of, left in self.limits.items() if of[0] <= pixels and of[1] <= frames and left < chunk]
        for of in wrong:
            del self.limits[of]
        return bool(wrong)


class MeasuredMemory:
    """Measured peaks by activity and shape, which replace or correct estimates, and chunk limits.

    Thread-safe.
    """

    def __init__(
        self, unseen: int = 0, slack: int = 0, folder: Path | None = None, identity: Mapping[str, Any] | None = None
    ) -> None:
        """Read the measurements of earlier groups.

        Args:
            unseen: bytes added to estimates until something similar is measured.
            slack: bytes normally kept free, which a video that was rendered before may use again.
            folder: folder of the file; None keeps all in memory.
            identity: JSON of what determines memory besides the shape, such as the model and the kinds of GPU.
        """
        self._unseen = unseen
        self._slack = slack
        self._identity = {"format": FORMAT, **(identity or {})}
        name = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self._path = folder and folder / f"{name}.json"
        self._peaks: dict[tuple[Activity, Shape], int] = {}
        self._limits = ChunkLimits()
        self._lock = threading.Lock()
        self._read()

    def expected(self, activity: Activity, shape: Shape, estimated: Callable[[Shape], int]) -> int:
        """Return the bytes to plan for. A video that was rendered before fits, and so do all smaller ones."""
        with self._lock:
            known = {of: peak for (done, of), peak in self._peaks.items() if done == activity}
        if shape in known:
            return known[shape] - self._slack
        larger = [peak - self._slack for of, peak in known.items() if all(map(le, shape, of))]
        return min([estimated(shape) + self._unforeseen(activity, shape, known, estimated), *larger])

    def _unforeseen(
        self, activity: Activity, shape: Shape, known: Mapping[Shape, int], estimated: Callable[[Shape], int]
    ) -> int:
        """Return the correction of an estimate: by how much the nearest measured size exceeded its estimate."""
        if not known:
            return self._unseen
        size = _size(activity, shape)
        nearest = min(known, key=lambda of: abs(math.log(_size(activity, of) / size)))
        excess = max(0, known[nearest] - estimated(nearest))
        is_alike = 1 / ALIKE <= _size(activity, nearest) / size <= ALIKE
        return excess if is_alike else max(excess, self._unseen)

    def largest_chunk(self, parameters: VideoParameters) -> int:
        """Return the decode_chunk_size to start with if the job has none."""
        with self._lock:
            return self._limits.largest(parameters)

    def learn(self, parameters: VideoParameters, peaks: Mapping[str, int], *, ran_out: bool | None = None) -> None:
        """Record the memory of a video.

        The parameters are as rendered, with the decode_chunk_size that was used; the peaks are `Sample.memory`.
        `ran_out` says whether a decode with a larger decode_chunk_size ran out of memory; None: it was not decoded.
        """
        measured = {(each, shape_for(each, parameters)): peaks[each] for each in ACTIVITIES if each in peaks}

        def apply() -> bool:
            is_news = self._add(measured)
            if ran_out is not None:
                note = self._limits.ran_out if ran_out else self._limits.fits
                is_news |= note(parameters, chunk_of(parameters))
            return is_news

        with self._lock:
            if apply():
                self._read()  # what other groups have written meanwhile
                apply()
                self._write()

    def _add(self, measured: Mapping[tuple[Activity, Shape], int]) -> bool:
        """Keep the highest peak of each; return whether any is new."""
        news = {what: peak for what, peak in measured.items() if peak > self._peaks.get(what, -1)}
        self._peaks.update(news)
        return bool(news)

    def _read(self) -> None:
        """Read the file; a damaged one is ignored."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            document = json.loads(self._path.read_text(encoding="utf-8"))
            measured = {(activity, tuple(shape)): peak for activity, shape, peak in document["bytes"]}
            limits = {(pixels, frames): chunk for pixels, frames, chunk in document["decode_chunk_size"]}
            for (activity, shape), peak in measured.items():
                if activity not in ACTIVITIES or len(shape) != _NUM_SIDES[activity]:
                    raise ValueError(activity)
                if activity == "step" and shape[3] not in (1, 2):
                    raise ValueError(shape)
                _check_counts(*shape, peak)
            for of, chunk in limits.items():
                _check_counts(*of, chunk)
            self._add(measured)
            self._limits.limits = limits | self._limits.limits

    def _write(self) -> None:
        """Write all measurements to the file; a full disk is ignored."""
        if self._path is None:
            return
        rows = [[activity, shape, peak] for (activity, shape), peak in sorted(self._peaks.items())]
        chunks = [[*of, chunk] for of, chunk in sorted(self._limits.limits.items())]
        document = {**self._identity, "bytes": rows, "decode_chunk_size": chunks}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)


def _check_counts(*values: Any) -> None:
    if not all(type(value) is int and 0 < value < 2**63 for value in values):  # more does not fit into a float
        raise ValueError(values)


def _pixels_and_frames(parameters: VideoParameters) -> tuple[int, int]:
    return parameters.width * parameters.height, parameters.num_frames


def _size(activity: Activity, shape: Shape) -> int:
    """Return a size to which memory is proportional: pixels, times frames computed at a time."""
    return math.prod(shape) if activity != "decode" else shape[0] * shape[1] * shape[3]
