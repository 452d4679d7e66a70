"""A sample: one video on its way through the ranks, with its parameters and the tensors that are its whole state.

After admission, denoising draws no random numbers, so a sample at a step boundary can be sent, stored and resumed
anywhere with the same bits.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

from svdq.pipeline.models.families import AnyParameters
from svdq.pipeline.models.video_model import State

PHOTOS = ("photo", "last_photo")  # tensors that are photos: the first frame and, for some jobs, the last
SOUND = "sound"  # the tensor that is left after the decode of a video with sound: (channels, N), float32
SHOWN = "shown"  # tensor in place of latents: the frames of a finished video (F, H, W, 3), uint8, to be upscaled
KEPT = "kept."  # prefix, after the decode, of the tensors before it where latents are kept
LAST_FRAME = "last_frame"  # tensor of an upscaled video: its last frame before that (H, W, 3), for the next of a chain


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """One resumption of a sample, after a restart of its group or in another group."""

    from_step: int  # the step it resumed from
    steps_done_again: int  # number of known steps from there on that had been done before and were lost


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One video in flight. Frozen: a step creates a new one."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    job_id: str  # id of its job
    index: int = 0  # its place in the order of admission; a rank works on the waiting sample with the lowest index
    parameters: AnyParameters  # its parameters, with the model's defaults filled in
    #: K+1 indices of its T+2 units, which are the encode, T steps and the decode: rank r does the units from
    #: boundaries[r] up to, not including, boundaries[r+1]. Empty: ranks only warm up for it.
    boundaries: tuple[int, ...]
    #: The relative costs of its steps, from `binding.step_costs`; none: 1 each.
    step_costs: tuple[float, ...] = ()
    #: The next denoising step; -1 before it is encoded, -2 before its prompts are, where these wait for their encoder;
    #: `parameters.steps` when denoising is done.
    step: int
    #: The state; before the encode the `PHOTOS`, (H, W, 3), uint8, and embeddings of texts; after the decode a `SOUND`;
    #: of a finished video whose file is upscaled, `SHOWN` and perhaps a `SOUND`.
    #: Empty for a sample that has failed or was canceled and travels on as a header alone.
    tensors: State = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)  # the job as JSON, which the pipeline does not read
    failure: str | None = None  # why it failed, as a sentence; None while all is well
    canceled: bool = False  # whether the user canceled it
    stages: tuple[tuple[int, int, float], ...] = ()  # rank, number of steps, seconds of denoising; in order
    #: Seconds spent besides denoising: `encode`, `decode`, `upscale`.
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: By which upscaler, and in which tiles; of a finished video, `of` says what of it: its `latents` or its `mp4`.
    upscaled: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)  # peak bytes of each activity besides weights; GPUs only
    chunk_chosen: bool = False  # whether the worker chose `decode_chunk_size` because the job has none
    resumed: tuple[Resumption, ...] = ()  # its resumptions, in order

    @property
    def ended(self) -> bool:
        """Whether it travels on only to be reported."""
        return self.canceled or self.failure is not None

    @property
    def num_computed(self) -> int | None:
        """The number of its steps that are computed, where others are skipped; None: all are."""
        return sum(map(bool, self.step_costs)) if 0.0 in self.step_costs else None

    def has_work(self, rank: int) -> bool:
        """Whether a rank has units of it to do."""
        return not self.ended and self.step + 1 < self.boundaries[rank + 1]

    @property
    def decoder(self) -> int:
        """The rank that decodes it."""
        # In rounds the boundaries end with the units that are done at once.
        return min(bisect_left(self.boundaries, self.parameters.steps + 2), len(self.boundaries) - 1) - 1

    def steps_of(self, rank: int) -> tuple[int, int]:
        """Return the first denoising step of a rank, and the one after its last."""
        first, stop = (min(max(unit - 1, 0), self.parameters.steps) for unit in self.boundaries[rank : rank + 2])
        return first, stop

    def taking(self, memory: Mapping[str, int]) -> Self:
        """Return the sample with a rank's measurements of its memory merged in."""
        if not memory:
            return self
        most = {what: max(num_bytes, self.memory.get(what, 0)) for what, num_bytes in memory.items()}
        return replace(self, memory={**self.memory, **most})

    def failed(self, reason: str) -> Self:
        """Return the sample as failed with a reason, without its tensors."""
        return replace(self, failure=reason, tensors={})


_SAMPLE = TypeAdapter(Sample)  # ranks of a group trust each other, so a body is converted, and not checked further


def sample_body(sample: Sample) -> dict[str, Any]:
    """Convert everything of a sample but its tensors to JSON."""
    body: dict[str, Any] = _SAMPLE.dump_python(sample, mode="json", exclude={"tensors"})
    return body


def sample_from(body: Mapping[str, Any], tensors: State) -> Sample:
    """Build a sample from the JSON of `sample_body` and tensors; raises ValueError if the JSON is not valid."""
    return replace(_SAMPLE.validate_python(body), tensors=tensors)
