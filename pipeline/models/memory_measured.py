"""What ranks have measured of the memory that videos take, remembered beyond the life of a group. Knows no devices."""

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
from typing import Any

from svdq.pipeline.models.memory_meter import ACTIVITIES, Activity, shape_for
from svdq.pipeline.parameters import VideoParameters

#: Bytes that cuDNN and cuBLAS work in, which an estimate does not see, until something was measured. A guess.
WORKSPACE_BYTES = 1_000_000_000
#: How many times larger or smaller a video may be for what was seen of it to be expected of another.
ALIKE = 2.0
#: Of the file: what is written in another form is not read.
FORMAT = 1

Shape = tuple[int, ...]


class MeasuredMemory:
    """Measurements by activity and shape. They go before estimates, and correct those of about the same size."""

    def __init__(
        self, unseen: int = 0, slack: int = 0, folder: Path | None = None, identity: Mapping[str, Any] | None = None
    ) -> None:
        """Take up what is remembered.

        Args:
            unseen: bytes to add to estimates until something like it was measured.
            slack: bytes that are kept free for what cannot be foreseen, and that what was made once may take again.
            folder: where it is remembered; None remembers it for the life of this object.
            identity: JSON of all but the shape that decides about memory, such as the model and the kinds of GPU.
        """
        self._unseen = unseen
        self._slack = slack
        self._identity = {"format": FORMAT, **(identity or {})}
        name = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self._path = folder and folder / f"{name}.json"
        self._known: dict[tuple[Activity, Shape], int] = {}
        self._lock = threading.Lock()
        self._read()

    def expected(self, activity: Activity, shape: Shape, estimate: Callable[..., int]) -> int:
        """Tell the bytes to plan for an activity with a shape; `estimate` is asked, with its numbers, where need be.

        What was made once has been shown to fit, and so has all that is smaller.
        """
        with self._lock:
            known = {of: number for (done, of), number in self._known.items() if done == activity}
        if shape in known:
            return known[shape] - self._slack
        larger = [number - self._slack for of, number in known.items() if all(map(le, shape, of))]
        return min([estimate(*shape) + self._unforeseen(activity, shape, known, estimate), *larger])

    def _unforeseen(
        self, activity: Activity, shape: Shape, known: Mapping[Shape, int], estimate: Callable[..., int]
    ) -> int:
        """Tell what to add to an estimate: what the measurement of about the same size had above its own."""
        if not known:
            return self._unseen
        size = _size(activity, shape)
        nearest = min(known, key=lambda of: abs(math.log(_size(activity, of) / size)))
        excess = max(0, known[nearest] - estimate(*nearest))
        is_alike = 1 / ALIKE <= _size(activity, nearest) / size <= ALIKE
        return excess if is_alike else max(excess, self._unseen)

    def learn(self, parameters: VideoParameters, memory: Mapping[str, int]) -> None:
        """Take note of what a video took, as `Sample.memory` has it; from any thread."""
        taken = {(each, shape_for(each, parameters)): memory[each] for each in ACTIVITIES if each in memory}
        with self._lock:
            if self._add(taken):
                self._write()

    def _add(self, taken: Mapping[tuple[Activity, Shape], int]) -> bool:
        """Keep the most that each ever took; says whether that is news."""
        news = {what: number for what, number in taken.items() if number > self._known.get(what, -1)}
        self._known.update(news)
        return bool(news)

    def _read(self) -> None:
        """Take up what the file says; one that is damaged says nothing."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            rows = json.loads(self._path.read_text(encoding="utf-8"))["bytes"]
            taken = {(activity, tuple(shape)): number for activity, shape, number in rows}
            example = VideoParameters(seed=0, frames=1)
            for (activity, shape), number in taken.items():
                if activity not in ACTIVITIES or len(shape) != len(shape_for(activity, example)):
                    raise ValueError(activity)
                if not all(type(value) is int and value > 0 for value in (*shape, number)):
                    raise ValueError(shape)
            self._add(taken)

    def _write(self) -> None:
        """Remember all, with what other groups have put there in the meantime; a full disk is no reason to stop."""
        if self._path is None:
            return
        self._read()
        rows = [[activity, shape, number] for (activity, shape), number in sorted(self._known.items())]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
            temporary.write_text(json.dumps({**self._identity, "bytes": rows}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)


def _size(activity: Activity, shape: Shape) -> int:
    """Give what memory is about in proportion to: pixels, times frames that are computed at a time."""
    return math.prod(shape) if activity != "decode" else shape[0] * shape[1] * shape[3]
