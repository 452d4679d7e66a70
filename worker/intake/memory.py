"""The memory plan of a group: whether a video fits, in which chunks it is decoded, and what else would fit."""

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.models.family_parameters import parse_parameters
from svdq.pipeline.models.memory import (
    RESERVE_BYTES,
    WORKSPACE_BYTES,
    MeasuredMemory,
    Shape,
    chunk_of,
    shape_for,
    size_text,
)
from svdq.pipeline.models.names import has_weights
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.binding import Components
from svdq.producer.text import count

logger = logging.getLogger(__name__)


class RankInfo(BaseModel):
    """What each rank reports to rank 0 when the ranks connect: mostly its memory."""

    model_config = ConfigDict(frozen=True)

    #: Bytes for weights and activations; None: no limit.
    capacity: int | None
    #: Bytes of its weights.
    weights: int
    #: The kind of GPU, or cpu.
    device: str
    #: Ranks that share the GPU, those of other groups included.
    ranks_per_gpu: int = 1
    #: Whether it has the VAE decoder.
    decodes: bool = False
    #: The denoising components that it has; None: all of the model.
    components: Components = None
    #: How it computes: `ModelInfo.compute`.
    compute: dict[str, Any] = {}


class DoesNotFitError(SvdqError):
    """A video needs more memory than a rank has; the message says what would fit."""


class MemoryPlan:
    """The memory that the ranks of a group have and need."""

    def __init__(
        self,
        ranks: Sequence[RankInfo],
        dtype: str,
        measured: MeasuredMemory | None = None,
        *,
        family: Family = SVD,
        facts: Facts | None = None,
    ) -> None:
        """Create it for ranks, rank 0 first; `dtype` is torch's name, `measured` has the peaks of earlier videos."""
        self._ranks = ranks
        self._dtype = dtype
        self._family = family
        self._facts = facts or family.published
        self._measured = measured or MeasuredMemory()

    def admit(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in an open decode_chunk_size with the largest that fits; `frames` is filled in already.

        Raises:
            DoesNotFitError: the video does not fit.
        """
        if parameters.decode_chunk_size is not None:
            asked_for = _with_chunks(parameters, chunk_of(parameters))
            if self._fits(asked_for):
                return asked_for
            raise DoesNotFitError(self._sentence(asked_for))
        largest = _with_chunks(parameters, self._measured.largest_chunk(parameters))
        fitting = largest if self._fits(largest) else self._smaller_chunks(largest)
        if fitting is None:
            raise DoesNotFitError(self._sentence(_with_chunks(parameters, 1)))
        return fitting

    def learn(self, body: Mapping[str, Any]) -> None:
        """Learn from the body of a report how much memory a video took; from any thread."""
        if not body:
            return  # the video was not started
        ran_out = body["ran_out"] if body["ran_out"] or "decode" in body["seconds"] else None
        self._measured.learn(parse_parameters(body["parameters"]), body["memory"], ran_out=ran_out)

    def decoders(self, parameters: VideoParameters) -> tuple[int, ...]:
        """Return the ranks that have the VAE decoder and the memory to decode a video; the last one in any case."""
        return tuple(
            rank
            for rank, there in enumerate(self._ranks)
            if rank == len(self._ranks) - 1
            or (
                there.decodes
                and (there.capacity is None or self.need(rank, parameters, decodes=True) <= there.capacity)
            )
        )

    def need(self, rank: int, parameters: VideoParameters, *, decodes: bool = False) -> int:
        """Return the bytes that a rank needs for a video: its weights, and the largest peak of what it computes.

        The last rank must be able to decode it, also without `decodes`.
        """
        decodes = decodes or rank == len(self._ranks) - 1
        has_steps = self._ranks[rank].components is None or bool(self._ranks[rank].components)
        peaks = [self._expected("step", parameters)] if has_steps else []
        if rank == 0:
            peaks.append(self._expected("encode", parameters))
        if decodes:
            peaks.append(self._expected("decode", parameters))
        return self._ranks[rank].weights + max(peaks)

    def _expected(self, activity: Any, parameters: VideoParameters) -> int:
        has_decoder = self._ranks[0].decodes or len(self._ranks) == 1

        def estimated(shape: Shape) -> int:
            return self._family.memory(activity, shape, self._dtype, self._facts, has_decoder=has_decoder)

        return self._measured.expected(activity, shape_for(activity, parameters), estimated)

    def _excess(self, parameters: VideoParameters) -> tuple[int, int]:
        """Return the rank that lacks most memory, and how many bytes; negative if the video fits."""
        excesses = [
            (self.need(rank, parameters) - there.capacity, -rank)
            for rank, there in enumerate(self._ranks)
            if there.capacity is not None
        ]
        excess, rank = max(excesses, default=(-1, 0))
        return -rank, excess

    def _fits(self, parameters: VideoParameters) -> bool:
        return self._excess(parameters)[1] <= 0

    # What would fit.

    def _smaller_chunks(self, parameters: VideoParameters) -> VideoParameters | None:
        """Find the largest decode_chunk_size with which a video fits: by halves, or of Wan 1."""
        chunk = chunk_of(parameters)
        while chunk > 1:
            chunk = parameters.smaller_chunk(chunk)
            if self._fits(smaller := _with_chunks(parameters, chunk)):
                return smaller
        return None

    def _fewer_frames(self, parameters: VideoParameters) -> str | None:
        """Find the most frames with which a video fits, in chunks of at most the same size."""
        for frames in range(parameters.num_frames - parameters.frame_step, 0, -parameters.frame_step):
            fewer = parameters.model_copy(update={"frames": frames})
            if self._fits(_with_chunks(fewer, chunk_of(fewer))):
                return count(frames, "frame")
        return None

    def _smaller_size(self, parameters: VideoParameters) -> str | None:
        """Find the largest size of nearly the same shape with which a video fits."""
        multiple = parameters.side_multiple
        for width in range(parameters.width - multiple, 0, -multiple):
            height = round(parameters.height * width / parameters.width / multiple) * multiple
            height = min(max(height, multiple), parameters.height)
            if self._fits(parameters.model_copy(update={"width": width, "height": height})):
                return f"{width}x{height}"
        return None

    # The message of DoesNotFitError.

    def _sentence(self, parameters: VideoParameters) -> str:
        rank, _ = self._excess(parameters)
        there = self._ranks[rank].capacity or 0
        where = f"{_place(rank, len(self._ranks))}, which has {size_text(there)}"
        chunk, need = chunk_of(parameters), size_text(self.need(rank, parameters))
        in_chunks = f", decoded {chunk} at a time," if chunk < parameters.num_frames else ""
        shape = f"{parameters.width}x{parameters.height} with {count(parameters.num_frames, 'frame')}{in_chunks}"
        return f"{shape} needs about {need} {where}: {self._advice(parameters)}"

    def _advice(self, parameters: VideoParameters) -> str:
        in_chunks = self._smaller_chunks(parameters)
        named = f"--decode-chunk-size {in_chunks.decode_chunk_size}" if in_chunks else None
        found = [named, self._fewer_frames(parameters), self._smaller_size(parameters)]
        if texts := [text for text in found if text]:
            return f"{texts[0]} would fit{''.join(f', or {other}' for other in texts[1:])}."
        # No single change is enough.
        one_by_one = _with_chunks(parameters, 1)
        if text := self._fewer_frames(one_by_one) or self._smaller_size(one_by_one):
            return f"{text} with --decode-chunk-size 1 would fit."
        return "no smaller video of this shape would fit either."


def plan_of(
    home: Path, info: ModelInfo, ranks: Sequence[RankInfo], limit: int | None, *, must_fit: bool = False
) -> MemoryPlan:
    """Make the plan of a group whose ranks are connected; `home` has the peaks that were measured before.

    `limit` is the bytes that the user grants each rank, None: the memory of its device.

    Raises:
        InputError: the weights alone need more than the user grants a rank or, with `must_fit`, than a rank has.
    """
    devices = sorted({rank.device for rank in ranks})
    identity = {
        "model": info.name,
        "compute": {name: value for name, value in info.compute.items() if name != "weights"},
        "devices": devices,
        "ranks_per_gpu": max(rank.ranks_per_gpu for rank in ranks),
        "memory_limit": limit,
        # Whether the rank with the encoder has the decoder as well.
        "has_decoder": ranks[0].decodes,
        "versions": {name: version(name) for name in ("svdq", "torch", "diffusers")},
    }
    unseen = 0 if devices == ["cpu"] else WORKSPACE_BYTES
    # Estimates are accurate to about a tenth.
    slack = RESERVE_BYTES if limit is None else limit // 10
    measured = MeasuredMemory(unseen, slack, home / "memory", identity)
    if not has_weights(info.name):
        if limit is not None:
            logger.warning(
                "--memory-limit (SVDQ_MEMORY_LIMIT) has no effect with the model %s, which takes little memory.",
                info.name,
            )
        ranks = [rank.model_copy(update={"capacity": None, "weights": 0}) for rank in ranks]
    elif limit is not None or must_fit:
        _check_weights(ranks, "--memory-limit (SVDQ_MEMORY_LIMIT) grants" if limit is not None else "there are")
    if there := [rank.capacity for rank in ranks if rank.capacity is not None]:
        logger.info("Ranks have at least %s of memory; videos that need more are refused.", size_text(min(there)))
    family = info.family or SVD  # without weights there is no limit, so nothing is estimated
    dtype = str(info.compute.get("dtype", "float32"))
    return MemoryPlan(ranks, dtype, measured, family=family, facts=info.facts)


def _check_weights(ranks: Sequence[RankInfo], granted: str) -> None:
    """Refuse memory below the weights; the GPUs of a new group may have more free memory later."""
    limits = [(there.weights, number, there.capacity) for number, there in enumerate(ranks) if there.capacity]
    need, rank, limit = max(limits, key=lambda found: found[0] - found[2], default=(0, 0, 0))
    if need > limit:
        raise InputError(
            f"The weights alone need {size_text(need)} {_place(rank, len(ranks))}, and {granted} "
            f"{size_text(limit) if limit >= 10**5 else f'{limit} bytes'}: every video would be refused; grant more, "
            "such as 24GB."
        )


def _with_chunks(parameters: VideoParameters, chunk: int) -> VideoParameters:
    return parameters.model_copy(update={"decode_chunk_size": chunk})


def _place(rank: int, num_ranks: int) -> str:
    """Name one of K ranks."""
    if num_ranks == 1:
        return "on this worker's only rank"
    if rank == num_ranks - 1:
        return "on the last rank of this group"
    return "on the first rank of this group" if rank == 0 else f"on rank {rank} of this group"
