"""What joins a stage to the world, as small protocols and the two things that pass through them. Knows no world.

Where videos come from and who hears how they ended (rank 0), where frames go (the last rank), who is told of progress,
who knows what is cancelled, and who keeps what is half done (every rank).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL.Image import Image

from svdq.pipeline.models.model import Frames
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Request:
    """A video to make, as rank 0 takes it in."""

    #: Id of the job that asks for it.
    job_id: str
    #: Its parameters, with `frames` filled in.
    parameters: VideoParameters
    #: The photo, exactly width x height; None where the model needs none, or the video is resumed.
    photo: Image | None
    #: What the source wants the sink to know, JSON; carried along unread.
    ticket: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the worker chose `decode_chunk_size`, because the job leaves it open.
    chunk_chosen: bool = False
    #: The same video as far as it came in an earlier life, on the device of rank 0; its parameters are those above.
    resume: Sample | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a sample ended; travels from the last rank to rank 0 as JSON."""

    #: Id of the job.
    job_id: str
    #: The sample's parameters, stages and seconds, as `message.sample_body` writes them.
    body: Mapping[str, Any]
    #: What the sink made of it, for the job's result; empty when it failed or was cancelled.
    result: Mapping[str, Any]
    #: Why it failed, as a sentence.
    failure: str | None = None
    #: Whether it was cancelled.
    cancelled: bool = False


class Source(Protocol):
    """Where rank 0 gets its work."""

    def take(self) -> Request | None:
        """Wait for the next video to make; None when no more will come."""
        ...

    def nearly_free(self) -> None:
        """Rank 0 is in its last step (or has none): now is the time to have the next request ready."""
        ...

    def ended(self, report: Report) -> None:
        """Take note that a sample has ended. Called from another thread, in the order of the ends."""
        ...


class Sink(Protocol):
    """Where the last rank puts frames; writes beside the loop and pushes back when it cannot follow."""

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        """Take the frames of a sample, and report its end when they are safe."""
        ...

    def release(self) -> None:
        """Let a `deliver` that waits return, and begin to write nothing more; for a rank that stops."""
        ...

    def close(self) -> None:
        """Wait until everything delivered is written and reported."""
        ...


class Monitor(Protocol):
    """Who is told of progress and knows what is cancelled; both must be cheap, they stand in the step loop."""

    def step(self, sample: Sample, index: int) -> None:
        """Step `index` of a sample is about to be done here; index == steps means its decode."""
        ...

    def warm_up(self, sample: Sample) -> None:
        """Take note that this rank is about to warm up for a sample that will come; it has no tensors yet."""
        ...

    def idle(self) -> None:
        """Nothing is being computed here: the stage waits for work, or for room to pass it on."""
        ...

    def cancelled(self, job_id: str) -> bool:
        """Whether the user has cancelled a job."""
        ...


class Keeper(Protocol):
    """Who keeps samples that are half done, so that a job that is taken again need not start anew."""

    def keep(self, sample: Sample) -> None:
        """Take a sample at a step boundary; its tensors are not changed any more.

        Never waits, and may let a sample go: a newer one will come.
        """
        ...


class NoKeeper:
    """Keeps nothing."""

    def keep(self, sample: Sample) -> None:
        """Let it go."""
