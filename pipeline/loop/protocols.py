"""The interfaces between a stage and its surroundings, and the types that pass through them.

Rank 0 has a source of videos, the last rank a sink of frames, every rank a monitor of its progress, which
also knows what is canceled, and a checkpointer. A class that implements one inherits what it does not need.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.loop.sample import Sample, sample_body
from svdq.pipeline.models.video_model import Frames
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import OnLost
from svdq.pipeline.video_parameters import VideoParameters


@dataclass(frozen=True, kw_only=True)
class Request:
    """A video to make, from the source of rank 0."""

    job_id: str  # id of its job
    parameters: VideoParameters  # its parameters, with the model's defaults filled in
    photo: Image | None = None  # exactly width x height; None if the model needs none or the video is resumed
    last_photo: Image | None = None  # photo of the last frame, of the same size, unless it is the first
    job: Mapping[str, Any] = field(default_factory=dict)  # the job, as JSON that its sample carries to the sink
    chunk_chosen: bool = False  # whether the worker chose `decode_chunk_size`, because the job leaves it open
    resume: Sample | None = None  # unfinished sample of an earlier attempt, on the device of rank 0
    #: The ranks that can encode and that can decode it, in order; None: all can.
    encoders: tuple[int, ...] | None = None
    decoders: tuple[int, ...] | None = None
    num_waiting: int = 0  # videos that waited behind it when it was taken
    priority: int = 0  # among the videos of a round, the lowest first


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a sample ended; travels from the last rank to rank 0 as JSON."""

    job_id: str  # id of the job
    body: Mapping[str, Any]  # the sample's parameters, stages and seconds, as `sample.sample_body` writes them
    #: The job's result, from the sink; empty when it failed or was canceled.
    result: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None  # why it failed, as a sentence
    canceled: bool = False  # whether it was canceled
    refused: bool = False  # whether it failed because this group makes no videos like it

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Report the end of a sample, without a result."""
        return cls(job_id=sample.job_id, body=sample_body(sample), failure=sample.failure, canceled=sample.canceled)


class Source(Protocol):
    """Supplies rank 0 with videos."""

    @property
    def lead_s(self) -> float:
        """Seconds that the next video takes to come, by which it is asked for earlier; from any thread."""
        return 0.0

    def take(self) -> Request | None:
        """Wait for the next video; return None when no more will come."""
        ...

    def ended(self, report: Report) -> None:
        """Handle the end of a sample. Called from another thread, in the order of the ends."""
        ...


class Sink(Protocol):
    """Receives frames on the last rank; writes them in the background and blocks when it cannot keep up.

    The stage loop delivers frames that this rank has decoded, the receiving thread frames of other ranks.
    """

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        """Take the frames of a sample, and report its end when they are safe."""
        ...

    def release(self) -> None:
        """Unblock `deliver` and start no more writes; for a rank that stops."""
        return

    def close(self) -> None:
        """Wait until everything delivered is written and reported."""
        return


class Monitor:
    """Receives progress and knows what is canceled; both must be cheap, since the step loop calls them."""

    def step(self, sample: Sample, index: int) -> None:
        """Handle the start of step `index` of a sample; index == steps means its decode."""

    def picture(self, sample: Sample, step: int, draw: Callable[[], Tensor | None]) -> None:
        """Take `draw`, which makes a picture after `step` steps, in any thread; it holds a sample's memory."""

    def warm_up(self, sample: Sample) -> None:
        """Handle the start of a warm-up for a sample that will come; it has no tensors yet."""

    def loading(self, components: str, expected_s: float | None) -> None:
        """Handle the start of loading a set of components, which took `expected_s` before; lasts until `idle`."""

    def idle(self) -> None:
        """Handle an idle stage: it waits for work, or for room to pass it on."""

    def canceled(self, job_id: str) -> bool:
        """Return whether the user has canceled a job."""
        return False


class Checkpointer:
    """Keeps unfinished samples, so that a job that is taken again need not start anew.

    A sample is saved with its final latents as well, and kept until its job has ended, so that frames that are lost on
    their way are decoded again.
    """

    def save(self, sample: Sample) -> None:
        """Take a sample at a step boundary, which stays unchanged; never blocks, and may drop it for a newer one."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The connections of a stage to the rest of its rank."""

    on_lost: OnLost  # called from a thread when a neighbor is gone; ends the process, since the group is broken
    source: Source | None = None  # on rank 0 only
    sink: Sink | None = None  # on the last rank only
    monitor: Monitor = field(default_factory=Monitor)
    checkpointer: Checkpointer = field(default_factory=Checkpointer)
    tracer: Tracer = field(default_factory=Tracer)
    #: Called when memory runs out for a video; returns whether other programs have taken it. The rank is stopped then,
    #: and the video goes on later.
    gives_way: Callable[[VideoParameters], bool] = lambda parameters: False
