"""Decides which rank holds which denoising components of a model, and so which steps of a video it may do. Pure code.

Samples go down the chain, so the ranks with the component of the first steps come before the others.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from svdq.pipeline.planning.costs import CostPrior

Components = frozenset[str] | None  # the denoising components that a rank holds; None: all of the model
Bounds = tuple[int, int]  # the units that a rank may do of a video: the first, and the one after the last


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of a video that one component of a model does."""

    component: str  # name of the component in the model folder, such as `unet`
    start: int  # its first step
    stop: int  # the step after its last
    #: The cost of each step, relative to a usual one; none: all are usual. A step of cost 0 is skipped: it needs what
    #: the step before has left on its rank, so nothing may come between the two.
    costs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What the steps of a video cost, as its family states it."""

    segments: tuple[Segment, ...]  # contiguous, from step 0 to the last
    step_work: float  # the work of a step of cost 1, in a unit that all videos of the model share

    @property
    def steps(self) -> list[float]:
        """The relative cost of each step."""
        return step_costs(self.segments)


def step_costs(segments: Sequence[Segment]) -> list[float]:
    """Return the relative cost of each step of a video."""
    return [
        cost for segment in segments for cost in segment.costs or itertools.repeat(1.0, segment.stop - segment.start)
    ]


def bind(segments: Sequence[Segment], has_room: Sequence[bool], prior: CostPrior) -> list[Components]:
    """Bind ranks to the components of a typical video, so that the slowest ranks are as fast as possible.

    `has_room` says for each rank whether its memory holds all components; each holds any one of them. Ranks with room
    hold all where this helps: all ranks, or some at the boundary. By the `prior`, rank 0 encodes as well, and the last
    ranks decode.
    """
    num_ranks = len(has_room)
    if len(segments) == 1 or num_ranks == 1 or all(has_room):
        return [None] * num_ranks
    first, second = segments
    first_steps = sum(step_costs([first])) + prior.encode_steps
    second_steps = sum(step_costs([second])) + prior.decode_steps
    choices = []
    for start in range(num_ranks + 1):  # the ranks with all components are those from `start` to `stop`
        for stop in range(start, num_ranks + 1):
            if stop == 0 or start == num_ranks or not all(has_room[start:stop]):
                continue
            slowest = max(
                first_steps / stop, second_steps / (num_ranks - start), (first_steps + second_steps) / num_ranks
            )
            choices.append((slowest, start - stop, start, stop))
    _, _, start, stop = min(choices)
    return [
        frozenset({first.component}) if rank < start else None if rank < stop else frozenset({second.component})
        for rank in range(num_ranks)
    ]


def bounds_of(
    segments: Sequence[Segment], components: Sequence[Components], encoders: Collection[int], decoders: Collection[int]
) -> list[Bounds]:
    """Return the units of a video that each rank may do, nondecreasing down the chain.

    `components` are from `bind`, `encoders` and `decoders` the ranks that can encode and decode. A rank whose component
    has no steps in the video, and that neither encodes nor decodes it, has an empty range.
    """
    num_units = segments[-1].stop + 2
    bounds: list[Bounds] = []
    done = 0  # where a rank without steps comes in
    for rank, held in enumerate(components):
        mine = [segment for segment in segments if held is None or segment.component in held]
        first, stop = (mine[0].start + 1, mine[-1].stop + 1) if mine else (done, done)
        if rank in encoders and first <= 1:
            first, stop = 0, max(stop, 1)
        if rank in decoders and stop == num_units - 1:
            stop = num_units
        bounds.append((first, stop))
        done = max(done, stop)
    # A sample that has passed the last rank of a segment does not come back.
    for rank in range(1, len(bounds)):
        bounds[rank] = (max(bounds[rank][0], bounds[rank - 1][0]), bounds[rank][1])
    for rank in range(len(bounds) - 2, -1, -1):
        bounds[rank] = (bounds[rank][0], min(bounds[rank][1], bounds[rank + 1][1]))
    assert bounds[0][0] == 0, "rank 0 cannot encode"
    assert bounds[-1][1] == num_units, "the last rank cannot decode"
    return bounds


def parse_segments(text: str) -> tuple[int, int]:
    """Parse the steps of two experts, such as 15+25; raises ValueError if it is something else."""
    found = re.fullmatch(r"([1-9]\d{0,2})\+([1-9]\d{0,2})", text)
    if found is None:
        raise ValueError("the steps of two experts are written like 15+25")
    return int(found[1]), int(found[2])


def split_steps(num_steps: int, segments: tuple[int, int]) -> tuple[int, int]:
    """Divide the steps of a video between two experts, in proportion to their `segments`."""
    first = round(num_steps * segments[0] / sum(segments))
    return first, num_steps - first
