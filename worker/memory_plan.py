"""The memory plan of a group: whether a video fits, and in which chunks it is decoded."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.compute.memory import WORKSPACE_BYTES, Activity, Phase, chunk_of, size_text
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.needs import bytes_by_phase
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.text import count

logger = logging.getLogger(__name__)

_Parameters = TypeVar("_Parameters", bound=VideoParameters)  # of a video, or of a job, which has more


class RankInfo(BaseModel):
    """The report of each rank to rank 0 when the ranks connect: mostly its memory."""

    model_config = ConfigDict(frozen=True)

    capacity: int | None  # bytes for weights and activations; None: no limit
    weights: int  # bytes of its weights; in rounds, the most that it holds at a time
    phase_weights: Mapping[Phase, int] = {}  # bytes that it holds in each phase, in rounds
    streamed_weights: int | None = None  # bytes for steps with `--offload blocks`, if it could
    device: str  # the kind of GPU, or cpu
    gpu: str = ""  # the UUID of the GPU
    ranks_per_gpu: int = 1  # ranks that share the GPU, also of other groups
    #: Whether it has the encoders of photos, and the VAE decoder.
    encodes: bool = False
    decodes: bool = False
    components: Components = None  # the denoising components that it has; None: all of the model
    compute: dict[str, Any] = {}  # how it computes: `ModelInfo.compute`


class DoesNotFitError(SvdqError):
    """A video needs more memory than a rank has."""

    def __init__(self, message: str, needed: str) -> None:
        super().__init__(message)
        self.needed = needed  # what it needs, such as "a GPU with 21.3 GB"


class MemoryPlan:
    """The memory that the ranks of a group have and need."""

    def __init__(
        self, ranks: Sequence[RankInfo], dtype: str, model: KnownModel | None = None, *, workspace: int = 0
    ) -> None:
        """Plan for ranks, rank 0 first; `dtype` is torch's name, `workspace` the bytes added to estimates.

        Without a `model`, which a capacity needs, everything fits.
        """
        self.ranks = ranks
        self.dtype = dtype
        self._model = model
        self.workspace = workspace

    def admit(self, parameters: _Parameters) -> _Parameters:
        """Fill in an open decode_chunk_size with the largest that fits; raises DoesNotFitError if none does."""
        chunk = chunk_of(parameters)
        while (rank := self._lacking(wanted := parameters.model_copy(update={"decode_chunk_size": chunk}))) is not None:
            if chunk == 1 or parameters.decode_chunk_size is not None:
                raise DoesNotFitError(self._sentence(wanted, rank), self._needed(wanted, rank))
            chunk = parameters.smaller_chunk(chunk)
        return wanted

    def able(self, activity: Literal["encode", "decode"], parameters: VideoParameters) -> tuple[int, ...]:
        """Return the ranks that can encode or decode a video; in any case the first, which encodes, or the last."""
        return tuple(
            rank
            for rank, there in enumerate(self.ranks)
            if activity in self._in_any_case(rank)
            or (
                (there.encodes if activity == "encode" else there.decodes)
                and (there.capacity is None or self.need(rank, parameters, activity) <= there.capacity)
            )
        )

    def _in_any_case(self, rank: int) -> list[Activity]:
        encodes: list[Activity] = ["encode"] if rank == 0 else []
        return [*encodes, "decode"] if rank == len(self.ranks) - 1 else encodes

    def need(self, rank: int, parameters: VideoParameters, *also: Activity) -> int:
        """Return the bytes that a rank needs: weights, and the largest peak of its activities and those in `also`."""
        return max(self._phases(rank, parameters, *also).values())

    def _phases(self, rank: int, parameters: VideoParameters, *also: Activity) -> dict[Phase, int]:
        there, first = self.ranks[rank], self.ranks[0]
        assert self._model is not None
        steps: list[Activity] = ["step"] if there.components is None or there.components else []
        return bytes_by_phase(
            self._model,
            self.dtype,
            parameters,
            {*steps, *self._in_any_case(rank), *also},
            lambda phase: there.phase_weights.get(phase, there.weights),
            workspace=self.workspace,
            has_decoder=first.decodes or len(self.ranks) == 1,
        )

    def _would_fit_streamed(self, rank: int, parameters: VideoParameters) -> bool:
        there, needs = self.ranks[rank], self._phases(rank, parameters)
        if there.streamed_weights is None or there.capacity is None or "step" not in needs:
            return False
        needs["step"] += there.streamed_weights - there.phase_weights.get("step", there.weights)
        return max(needs.values()) <= there.capacity

    def _lacking(self, parameters: VideoParameters) -> int | None:
        excesses = {
            rank: self.need(rank, parameters) - there.capacity
            for rank, there in enumerate(self.ranks)
            if there.capacity is not None
        }
        rank = max(excesses, key=lambda rank: excesses[rank], default=None)
        return rank if rank is not None and excesses[rank] > 0 else None

    def _needed(self, parameters: VideoParameters, rank: int) -> str:
        size = size_text(self.need(rank, parameters))
        return f"{size} of memory" if self.ranks[rank].device == "cpu" else f"a GPU with {size}"

    def _sentence(self, parameters: VideoParameters, rank: int) -> str:
        there = self.ranks[rank].capacity or 0
        where = f"on rank {rank} of {len(self.ranks)}, which has {size_text(there)}"
        chunk, num_bytes = chunk_of(parameters), self.need(rank, parameters)
        in_chunks = f", decoded {chunk} at a time," if chunk < parameters.num_frames else ""
        shape = f"{parameters.width}x{parameters.height} with {count(parameters.num_frames, 'frame')}{in_chunks}"
        smaller = "fewer frames, a smaller size" + (", a smaller --decode-chunk-size" if chunk > 1 else "")
        device = self.ranks[rank].device
        if self._would_fit_streamed(rank, parameters):
            advice = f"start the worker with --offload blocks, or choose {smaller}"
        elif device != "cpu" and num_bytes <= max(each.capacity or 0 for each in self.ranks):
            advice = f"choose {smaller}, or leave the {device} out with CUDA_VISIBLE_DEVICES"
        else:
            advice = f"choose {smaller}, or grant more with --memory-limit"
        return f"{shape} needs about {size_text(num_bytes)} {where}: {advice}."


def plan_of(info: ModelInfo, ranks: Sequence[RankInfo], limit: int | None, *, must_fit: bool = False) -> MemoryPlan:
    """Make the plan of a group; `limit` is the bytes that the user grants each rank, None: all of its device.

    Raises InputError if the weights alone need more than that or, with `must_fit`, than a rank has.
    """
    workspace = WORKSPACE_BYTES if any(rank.device != "cpu" for rank in ranks) else 0
    if info.family is None:
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
    return MemoryPlan(ranks, str(info.compute.get("dtype", "float32")), info.known, workspace=workspace)


def _check_weights(ranks: Sequence[RankInfo], granted: str) -> None:
    """Refuse memory below the weights; the GPUs of a new group may have more free memory later."""
    limits = [(there.weights, number, there.capacity) for number, there in enumerate(ranks) if there.capacity]
    need, rank, limit = max(limits, key=lambda found: found[0] - found[2], default=(0, 0, 0))
    if need > limit:
        streamed = ranks[rank].streamed_weights
        held = {**ranks[rank].phase_weights, "step": streamed or 0}
        would_fit = streamed is not None and max(held.values()) <= limit
        advice = "start the worker with --offload blocks, or grant more." if would_fit else "grant more, such as 24GB."
        raise InputError(
            f"The weights alone need {size_text(need)} on rank {rank} of {len(ranks)}, and {granted} "
            f"{size_text(limit) if limit >= 10**5 else f'{limit} bytes'}: every video would be refused; {advice}"
        )
