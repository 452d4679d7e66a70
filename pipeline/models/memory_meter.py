"""What encode, step and decode really take on a GPU, measured when they first run for a shape of video.

PyTorch's allocator counts on the host as memory is asked for, so that to measure makes a GPU wait for nothing; what
cuDNN and cuBLAS work in is asked of it, too. Knows nothing of ranks and of how much memory there is.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol, get_args

import torch

from svdq.pipeline.models.memory_words import chunk_of
from svdq.pipeline.parameters import VideoParameters

#: What is measured apart.
Activity = Literal["encode", "step", "decode"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class Counter(Protocol):
    """Counts the bytes of a device that are in use."""

    def restart(self) -> int:
        """Look for a peak from now on, and tell what is in use now."""
        ...

    def peak(self) -> int:
        """Tell the most that was in use at a time since `restart`."""
        ...


class CudaCounter:
    """PyTorch's allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> int:
        """See `Counter`, and for the other too."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See there."""
        return torch.cuda.max_memory_allocated(self._device)


class MemoryMeter:
    """Measures encode, step and decode once for each shape, and remembers it. For one thread."""

    def __init__(self, counter: Counter | None) -> None:
        """Make it; without a counter it measures nothing.

        Of a processor there is none: Linux knows the peak of all resident memory, where the weights' files count too.
        """
        self._counter = counter
        self._measured: dict[tuple[str, tuple[int, ...]], int] = {}

    @classmethod
    def of(cls, device: torch.device) -> "MemoryMeter":
        """Make the meter of a device."""
        return cls(CudaCounter(device) if device.type == "cuda" else None)

    def begin(self, activity: Activity, shape: tuple[int, ...]) -> Callable[[], None]:
        """Begin to measure for what `shape_for` gives; returns what is to be called at its end, if it got there.

        What is known already is not measured again.
        """
        if self._counter is None or (activity, shape) in self._measured:
            return lambda: None
        counter, before = self._counter, self._counter.restart()

        def end() -> None:
            self._measured[activity, shape] = counter.peak() - before

        return end

    @contextmanager
    def measuring(self, activity: Activity, shape: tuple[int, ...]) -> Iterator[None]:
        """Measure a block; see `begin`."""
        end = self.begin(activity, shape)
        yield
        end()

    def measured(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Tell the bytes that each took for a shape of video, besides weights, as far as it is known."""
        return {
            activity: self._measured[what]
            for activity in ACTIVITIES
            if (what := (activity, shape_for(activity, parameters))) in self._measured
        }


def shape_for(activity: Activity, parameters: VideoParameters) -> tuple[int, ...]:
    """Give what of a video decides how much memory it takes.

    Returns:
        Width and height; for a step and a decode also frames; then B, 2 with guidance, for a step, and the frames at a
        time for a decode.
    """
    width, height, frames = parameters.width, parameters.height, parameters.num_frames
    if activity == "encode":
        return (width, height)
    return (width, height, frames, 1 + parameters.guided if activity == "step" else chunk_of(parameters))
