"""What flows between ranks: one video on its way, its parameters and the tensors that are its whole state.

After admission denoising draws no random number (Euler's method without churn), so a sample at a step boundary can be
sent, stored and taken up again anywhere with the same bits. Knows nothing of how it travels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from svdq.pipeline.parameters import VideoParameters

#: The tensors of a sample by name, all on one device:
#: `latents` (1, F, C, H/8, W/8), what is denoised;
#: `image_latents` (1, C, H/8, W/8), the encoded photo, not repeated over frames;
#: `image_embedding` (1, 1, E), CLIP's view of the photo (absent from models that have none).
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """One time that a sample was taken up again, in another life of its group or in another group."""

    #: The step it went on from.
    from_step: int
    #: Steps from there on that had been done before and were lost, as far as anyone saw.
    steps_done_again: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One video in flight. Frozen: a step makes a new one."""

    #: Id of the job that asked for it.
    job_id: str
    #: Its parameters, with `frames` filled in.
    parameters: VideoParameters
    #: K+1 step indices: rank r does the steps from boundaries[r] up to, not including, boundaries[r+1].
    boundaries: tuple[int, ...]
    #: The next denoising step; equals `parameters.steps` when denoising is done.
    step: int
    #: The state; empty for a sample that has failed or was cancelled and travels on as a header alone.
    tensors: Tensors = field(default_factory=dict)
    #: What the source wants the sink to know, JSON; carried along unread.
    ticket: Mapping[str, Any] = field(default_factory=dict)
    #: Why it failed, as a sentence; None while all is well.
    failure: str | None = None
    #: Whether the user cancelled it.
    cancelled: bool = False
    #: (rank, number of steps, seconds of denoising) of each rank that did some, in order.
    stages: tuple[tuple[int, int, float], ...] = ()
    #: Seconds spent besides denoising: `encode`, `decode`.
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: Bytes that encode, step and decode took besides weights, on the rank where it was the most; GPUs only.
    memory: Mapping[str, int] = field(default_factory=dict)
    #: Whether the worker chose `decode_chunk_size`, because the job leaves it open.
    chunk_chosen: bool = False
    #: Whether a decode ran out of memory; `decode_chunk_size` is what was left.
    ran_out: bool = False
    #: Each time it was taken up again, in order.
    resumed: tuple[Resumption, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether it travels on only to be reported."""
        return self.cancelled or self.failure is not None

    def taking(self, memory: Mapping[str, int]) -> Self:
        """Note what a rank has measured of the memory that the sample takes."""
        if not memory:
            return self
        most = {what: max(num_bytes, self.memory.get(what, 0)) for what, num_bytes in memory.items()}
        return replace(self, memory={**self.memory, **most})

    def failed(self, reason: str) -> Self:
        """End the sample with a reason, without its tensors."""
        return replace(self, failure=reason, tensors={})
