"""Whether a video fits into the memory of a group's ranks, and what would fit in its place. Pure: no torch, no devices.

What parts of a video take is asked of estimates, and what there is was told by the ranks.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import le
from typing import Protocol

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.models.memory_measured import MeasuredMemory
from svdq.pipeline.models.memory_meter import shape_for
from svdq.pipeline.models.memory_words import chunk_of, differences, frames_text, place, shape_text
from svdq.pipeline.models.size_text import size_text
from svdq.pipeline.parameters import SIZE_MULTIPLE, VideoParameters


class Estimates(Protocol):
    """What a model takes, in bytes."""

    def weights(self, encoder: bool, decoder: bool) -> int:
        """Tell those of the UNet, with the image and VAE encoders and the VAE decoder where a rank has them."""
        ...

    def encode(self, decoder: bool, width: int, height: int) -> int:
        """Tell what encoding takes besides weights, on a rank with or without the decoder."""
        ...

    def step(self, width: int, height: int, frames: int, guided: bool, chunked: bool = False) -> int:
        """Tell what a step takes besides weights; `chunked`: with forward chunking, whether it is on or not."""
        ...

    def decode(self, width: int, height: int, frames: int, decode_chunk_size: int) -> int:
        """Tell what decoding takes besides weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that some ranks share, as a rule one rank alone."""

    #: Bytes for weights and all that is computed.
    capacity: int
    #: Who computes in it.
    ranks: tuple[int, ...]


class DoesNotFitError(SvdqError):
    """A video needs more memory than there is; says what would fit."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A video that fits."""

    #: How it is to be made.
    parameters: VideoParameters
    #: What was changed to make it fit, in words; "" for nothing.
    adjusted: str = ""


class MemoryPlan:
    """What the ranks of a group can hold."""

    def __init__(
        self,
        num_ranks: int,
        rooms: Sequence[Room],
        estimates: Estimates,
        *,
        fit: bool,
        measured: MeasuredMemory | None = None,
    ) -> None:
        """Make it.

        Args:
            num_ranks: K.
            rooms: the memory of all ranks; a rank that is in none is never too small.
            estimates: what the model takes.
            fit: change videos that do not fit, in place of refusing them.
            measured: what is known from videos that were made; goes before estimates.
        """
        self._num_ranks = num_ranks
        self._rooms = rooms
        self._estimates = estimates
        self._fit = fit
        self._measured = measured or MeasuredMemory()
        #: Whether each rank has its memory for itself.
        self._apart = all(len(room.ranks) == 1 for room in rooms)
        #: Steps of which it is known what they take: (width, height, frames, B).
        self._steps: set[tuple[int, ...]] = set()

    def admit(self, parameters: VideoParameters) -> Admitted:
        """Look whether a video fits; the same video gets the same answer until something new is measured.

        One that leaves its decode_chunk_size open gets the largest that fits.

        Args:
            parameters: with frames filled in.

        Raises:
            DoesNotFitError: it does not, and may not be changed or cannot be made to fit.
        """
        asked_for = parameters.model_copy(update={"decode_chunk_size": chunk_of(parameters)})
        if not self._rooms or self._fits(asked_for):
            return Admitted(parameters=asked_for)
        is_open = parameters.decode_chunk_size is None
        smaller = self._smaller_chunks(asked_for) if is_open or self._fit else None
        if smaller is None and self._fit:
            smaller = self._fewer_frames_in_any_chunks(asked_for)
        if smaller is not None:
            return Admitted(parameters=smaller, adjusted=differences(asked_for, smaller))
        if is_open:
            asked_for = asked_for.model_copy(update={"decode_chunk_size": 1})
        raise DoesNotFitError(self._sentence(asked_for))

    def need(self, rank: int, parameters: VideoParameters | None, *, chunked: bool = False) -> int:
        """Tell how many bytes a rank needs for a video: its weights, and the most that it computes in at a time.

        Args:
            rank: of the group.
            parameters: of the video; None: the weights alone.
            chunked: as it would be if the worker did forward chunking.
        """
        first, last = rank == 0, rank == self._num_ranks - 1
        weights = self._estimates.weights(first, last)
        if parameters is None:
            return weights
        shape = shape_for("step", parameters)
        peaks = [self._chunked_step(shape) if chunked else self._step(shape)]
        if first:
            encode = partial(self._estimates.encode, last)
            peaks.append(self._measured.expected("encode", shape_for("encode", parameters), encode))
        if last:
            shape = shape_for("decode", parameters)
            peaks.append(self._measured.expected("decode", shape, self._estimates.decode))
        return weights + max(peaks)

    def learn(self, parameters: VideoParameters, memory: Mapping[str, int]) -> None:
        """Take note of what ranks have measured of a video: `Sample.memory`; from any thread."""
        self._measured.learn(parameters, memory)

    def _step(self, shape: tuple[int, ...]) -> int:
        """Tell what a step takes; or what one of a larger video takes if even that fits: to estimate costs seconds."""
        # Where ranks share a GPU, what one leaves over another needs, so that each has to be told exactly.
        for larger in self._steps - {shape} if self._apart else ():
            if all(map(le, shape, larger)) and self._has_room(num_bytes := self._step_alone(larger)):
                return num_bytes
        self._steps.add(shape)
        return self._step_alone(shape)

    def _step_alone(self, shape: tuple[int, ...]) -> int:
        return self._measured.expected(
            "step", shape, lambda width, height, frames, batch: self._estimates.step(width, height, frames, batch > 1)
        )

    def _chunked_step(self, shape: tuple[int, ...]) -> int:
        width, height, frames, batch = shape
        estimated, chunked = (self._estimates.step(width, height, frames, batch > 1, each) for each in (False, True))
        # What was measured besides is taken to stay.
        return chunked + max(0, self._step_alone(shape) - estimated)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether all ranks can take as much besides their weights."""
        return all(
            sum(self.need(rank, None) + num_bytes for rank in room.ranks) <= room.capacity for room in self._rooms
        )

    def _needs(self, parameters: VideoParameters | None, *, chunked: bool = False) -> list[int]:
        """Tell how many bytes each room needs to have; without a video those of the weights."""
        return [sum(self.need(rank, parameters, chunked=chunked) for rank in room.ranks) for room in self._rooms]

    def _excess(self, parameters: VideoParameters | None, *, chunked: bool = False) -> int:
        """Tell by how many bytes the room that is shortest falls short; negative where all fits."""
        needs = self._needs(parameters, chunked=chunked)
        return max(need - room.capacity for need, room in zip(needs, self._rooms, strict=True))

    def _fits(self, parameters: VideoParameters) -> bool:
        return self._excess(parameters) <= 0

    # What would fit.

    def _smaller_chunks(self, parameters: VideoParameters) -> VideoParameters | None:
        """Find the largest decode_chunk_size, by halves, with which a video fits."""
        chunk = chunk_of(parameters)
        while chunk > 1:
            chunk = (chunk + 1) // 2
            if self._fits(smaller := parameters.model_copy(update={"decode_chunk_size": chunk})):
                return smaller
        return None

    def _fewer_frames(self, parameters: VideoParameters) -> VideoParameters | None:
        """Find the most frames, below those of a video, with which it fits; chunks stay as they are or get smaller."""
        counts = list(range(1, parameters.num_frames + 1))
        return self._largest([_with_frames(parameters, count) for count in counts], counts)

    def _fewer_frames_in_any_chunks(self, parameters: VideoParameters) -> VideoParameters | None:
        """Find the most frames with which a video fits, and the largest chunks that do for these."""
        smaller = self._fewer_frames(parameters.model_copy(update={"decode_chunk_size": 1}))
        if smaller is None:
            return None
        asked_for = _with_frames(parameters, smaller.num_frames)
        return asked_for if self._fits(asked_for) else self._smaller_chunks(asked_for)

    def _smaller_size(self, parameters: VideoParameters) -> VideoParameters | None:
        """Find the largest size of nearly the same shape with which a video fits."""
        sizes = []
        for width in range(SIZE_MULTIPLE, parameters.width, SIZE_MULTIPLE):
            height = round(parameters.height * width / parameters.width / SIZE_MULTIPLE) * SIZE_MULTIPLE
            sizes.append({"width": width, "height": min(max(height, SIZE_MULTIPLE), parameters.height)})
        candidates = [*(parameters.model_copy(update=size) for size in sizes), parameters]
        return self._largest(candidates, [candidate.width * candidate.height for candidate in candidates])

    def _largest(self, candidates: Sequence[VideoParameters], sizes: Sequence[int]) -> VideoParameters | None:
        """Find the last candidate that fits; the last one of all does not.

        Needs rise with `sizes` nearly in proportion, which says where to look: to try one costs seconds.
        """
        fitting, failing = -1, len(candidates) - 1
        # (size, excess) of both; of nothing there are the weights alone.
        low, high = (0, self._excess(None)), (sizes[failing], self._excess(candidates[failing]))
        if low[1] > 0:
            return None
        while failing - fitting > 1:
            wanted = low[0] + (high[0] - low[0]) * -low[1] / (high[1] - low[1])
            guess = bisect_right(sizes, wanted) - 1
            guess = min(max(guess, fitting + 1), failing - 1)
            found = (sizes[guess], self._excess(candidates[guess]))
            if found[1] <= 0:
                fitting, low = guess, found
            else:
                failing, high = guess, found
        return candidates[fitting] if fitting >= 0 else None

    # What is said.

    def _sentence(self, parameters: VideoParameters) -> str:
        needs = self._needs(parameters)
        need, room = max(zip(needs, self._rooms, strict=True), key=lambda pair: pair[0] - pair[1].capacity)
        where = f"{place(room.ranks, self._num_ranks)}, which has {size_text(room.capacity)}"
        return f"{shape_text(parameters)} needs about {size_text(need)} {where}: {self._advice(parameters)}"

    def _advice(self, parameters: VideoParameters) -> str:
        found = []
        in_chunks = self._smaller_chunks(parameters)
        if in_chunks is not None:
            found.append(f"--decode-chunk-size {in_chunks.decode_chunk_size}")
        if (smaller := self._fewer_frames(parameters)) is not None:
            found.append(frames_text(smaller.num_frames))
        if (smaller := self._smaller_size(parameters)) is not None:
            found.append(f"{smaller.width}x{smaller.height}")
        if in_chunks is None and self._excess(parameters, chunked=True) <= 0:
            found.append("all of it with `svdq worker --forward-chunking`")
        if found:
            return f"{found[0]} would fit{''.join(f', or {other}' for other in found[1:])}."
        # Neither alone: what would do together.
        one_by_one = parameters.model_copy(update={"decode_chunk_size": 1})
        if (smaller := self._fewer_frames(one_by_one)) is not None:
            return f"{frames_text(smaller.num_frames)} with --decode-chunk-size 1 would fit."
        if (smaller := self._smaller_size(one_by_one)) is not None:
            return f"{smaller.width}x{smaller.height} with --decode-chunk-size 1 would fit."
        return "no smaller video of this shape would fit either."


def _with_frames(parameters: VideoParameters, frames: int) -> VideoParameters:
    """Take fewer frames, in chunks that are not larger than that."""
    return parameters.model_copy(update={"frames": frames, "decode_chunk_size": min(chunk_of(parameters), frames)})
