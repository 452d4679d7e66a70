"""What ranks have measured of the memory that videos take, remembered beyond the life of a group. Knows no devices."""

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from svdq.pipeline.models.memory_meter import ACTIVITIES, Activity, shape_for
from svdq.pipeline.parameters import VideoParameters

#: Bytes that cuDNN and cuBLAS work in, which an estimate does not see, until something was measured. A guess.
WORKSPACE_BYTES = 1_000_000_000

Shape = tuple[int, ...]


class MeasuredMemory:
    """Measurements by activity and shape. They go before estimates, and correct those of other shapes."""

    def __init__(self, unseen: int = 0, path: Path | None = None, identity: Mapping[str, Any] | None = None) -> None:
        """Take up what is remembered.

        Args:
            unseen: bytes to add to estimates until something like it was measured.
            path: the folder where it is remembered; None remembers it for the life of this object.
            identity: JSON of all but the shape that decides about memory, such as the model and the kind of GPU.
        """
        self._unseen = unseen
        self._identity = dict(identity or {})
        name = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self._path = path and path / f"{name}.json"
        self._known: dict[tuple[Activity, Shape], int] = {}
        self._lock = threading.Lock()
        self._read()

    def expected(self, activity: Activity, shape: Shape, estimate: Callable[..., int]) -> int:
        """Tell the bytes that an activity takes for a shape; `estimate` is asked, with its numbers, where need be."""
        with self._lock:
            known = {of: number for (done, of), number in self._known.items() if done == activity}
        if shape in known:
            return known[shape]
        if not known:
            return estimate(*shape) + self._unseen
        # What an estimate does not see is about the same for a video of about the same size.
        extent = math.log(math.prod(shape))
        nearest = min(known, key=lambda other: abs(math.log(math.prod(other)) - extent))
        return estimate(*shape) + max(0, known[nearest] - estimate(*nearest))

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
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            rows = json.loads(self._path.read_text(encoding="utf-8"))["bytes"]
            self._add({(activity, tuple(shape)): int(number) for activity, shape, number in rows})

    def _write(self) -> None:
        """Remember all, with what other groups have put there in the meantime; a full disk is no reason to stop."""
        if self._path is None:
            return
        self._read()
        rows = [[activity, shape, number] for (activity, shape), number in sorted(self._known.items())]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**self._identity, "bytes": rows}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)
