"""The capacity model: what a number of GPUs makes of what a video costs. Pure arithmetic; knows no clock and no files.

Symbols are those of docs/internals/capacity.md: T steps of t seconds, E to encode, D to decode, X until a hand-over has
arrived, H that each rank spends a video on handing over; K ranks a group, G groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Protocol, Self

from svdq.pipeline.bench.measure import batch_time_s
from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, fair_shares, fair_time_s

#: Paces within this of each other are the same.
_SAME = 1e-6


class Limit(StrEnum):
    """What keeps a group from being faster."""

    #: All ranks are equally busy: the steps are shared out, and another GPU takes its share.
    STEPS = "steps"
    #: Rank 0 encodes all the time.
    ENCODE = "encode"
    #: The last rank decodes all the time.
    DECODE = "decode"
    #: A link is always sending.
    TRANSFER = "transfer"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to use GPUs: so many groups of so many ranks, which share one queue."""

    #: What to call it.
    name: str
    #: G and K: one group of K ranks is the pipeline, G groups of one rank are replicas.
    groups: int
    ranks: int
    #: Seconds from the start of a group to its first video, the fill, and between two videos after it.
    first_s: float
    pace_s: float

    @property
    def gpus(self) -> int:
        """GPUs of all groups together."""
        return self.groups * self.ranks

    @property
    def videos_an_hour(self) -> float:
        """Videos an hour once all groups are filled."""
        return 3600 * self.groups / self.pace_s

    def time_s(self, num_videos: int) -> float:
        """Give the seconds until the last of so many videos is done."""
        return batch_time_s(math.ceil(num_videos / self.groups), self.first_s, self.pace_s)

    def finished(self, after_s: float) -> int:
        """Count the videos that are done after so many seconds."""
        if after_s < self.first_s:
            return 0
        return self.groups * (1 + math.floor((after_s - self.first_s) / self.pace_s + _SAME))

    def groups_needed(self, num_videos: int, deadline_s: float) -> int | None:
        """Count the groups like these that make so many videos in time; None when no number does."""
        each = replace(self, groups=1).finished(deadline_s)
        return math.ceil(num_videos / each) if each else None


class Model(Protocol):
    """Whatever says what groups of GPUs can do."""

    @property
    def group_sizes(self) -> Sequence[int]:
        """The numbers of ranks that it makes sense for a group to have, ascending; the first is 1."""
        ...

    @property
    def measured_ranks(self) -> int | None:
        """The ranks of the group that was measured; None where it was no group."""
        ...

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Give what so many groups of so many ranks do."""
        ...


@dataclass(frozen=True, kw_only=True)
class VideoCosts:
    """What a video of one shape costs."""

    #: T.
    steps: int
    #: t, E and D. A step's time stands for each GPU that was measured: of a larger group the further GPUs are like
    #: the median one, a smaller group goes without the slowest.
    costs: Costs
    #: X: seconds until a hand-over has reached the next rank. Beside the computing, one at a time on a link.
    transfer_s: float = 0.0
    #: H: seconds a video that a rank of several spends besides computing: receiving, checking, sending.
    overhead_s: float = 0.0

    @property
    def group_sizes(self) -> range:
        """From 1 to the largest useful number of ranks."""
        return range(1, largest_useful(self)[0] + 1)

    @property
    def measured_ranks(self) -> int | None:
        """As many as there are steps' times, unless that is one."""
        return len(self.costs.step_s) if len(self.costs.step_s) > 1 else None

    def on(self, ranks: int) -> Costs:
        """Give the costs on a group of so many ranks."""
        step_s = list(self.costs.step_s)
        while len(step_s) > ranks:
            step_s.remove(max(step_s))
        step_s += [median(self.costs.step_s)] * (ranks - len(step_s))
        return replace(self.costs, step_s=tuple(step_s))

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Give what so many groups of so many ranks do; each group has the GPUs of `on`."""
        costs = self.on(ranks)
        overhead_s = self.overhead_s if ranks > 1 else 0.0
        shares = fair_shares(self.steps, costs)
        steps_s = sum(share * step_s for share, step_s in zip(shares, costs.step_s, strict=True))
        first_s = steps_s + costs.encode_s + costs.decode_s + ranks * overhead_s + (ranks - 1) * self.transfer_s
        pace_s = fair_time_s(self.steps, costs) + overhead_s
        if ranks > 1:
            pace_s = max(pace_s, self.transfer_s)
        return Way(name=name_of(ranks, groups), groups=groups, ranks=ranks, first_s=first_s, pace_s=pace_s)

    def scaled(self, *, step: float = 1.0, encode: float = 1.0, decode: float = 1.0, transfer: float = 1.0) -> Self:
        """Give the costs with each part made longer or shorter by a factor."""
        costs = Costs(
            step_s=tuple(step_s * step for step_s in self.costs.step_s),
            encode_s=self.costs.encode_s * encode,
            decode_s=self.costs.decode_s * decode,
        )
        return replace(self, costs=costs, transfer_s=self.transfer_s * transfer)


@dataclass(frozen=True, kw_only=True)
class GivenPace:
    """A group that is known only by how it behaves: its fill and its pace, and what one GPU does."""

    #: K of the group.
    ranks: int
    #: Seconds of a video on one GPU.
    one_gpu_s: float
    #: Seconds to the group's first video, and between two after it.
    fill_s: float
    pace_s: float

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """One, and that of the group."""
        return (1, self.ranks) if self.ranks > 1 else (1,)

    @property
    def measured_ranks(self) -> int | None:
        """Those of the group."""
        return self.ranks

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Give what so many groups do.

        Raises:
            InputError: groups of this size were not measured.
        """
        if ranks not in self.group_sizes:
            raise InputError(
                f"A group of {ranks} GPUs cannot be told from one of {self.ranks} by its fill and pace alone; give "
                "--steps, --step-ms, --encode-ms and --decode-ms instead."
            )
        first_s, pace_s = (self.one_gpu_s,) * 2 if ranks == 1 else (self.fill_s, self.pace_s)
        return Way(name=name_of(ranks, groups), groups=groups, ranks=ranks, first_s=first_s, pace_s=pace_s)


def name_of(ranks: int, groups: int) -> str:
    """Name a way to use GPUs."""
    if ranks == 1:
        return "one GPU" if groups == 1 else f"{groups} replicas"
    return f"pipeline of {ranks}" if groups == 1 else f"{groups} groups of {ranks}"


def limit(video: VideoCosts, ranks: int) -> Limit:
    """Say what keeps a group of so many ranks from being faster."""
    pace_s = video.way(ranks).pace_s
    overhead_s = video.overhead_s if ranks > 1 else 0.0
    if ranks == 1:
        return Limit.STEPS
    for reason, floor_s in (
        (Limit.TRANSFER, video.transfer_s),
        (Limit.DECODE, video.costs.decode_s + overhead_s),
        (Limit.ENCODE, video.costs.encode_s + overhead_s),
    ):
        if floor_s > 0 and pace_s <= floor_s * (1 + _SAME):
            return reason
    return Limit.STEPS


def largest_useful(video: VideoCosts) -> tuple[int, Limit]:
    """Give the largest number of ranks that a group should have, and what makes more of them useless.

    Up to it each further GPU makes the group faster. It ends where a link, the decode or the encode alone takes as long
    as everything else's share; else at T ranks. A group of more ranks than steps works too, with ranks taking turns at
    having a step, but two groups of half as many are as fast with half the hand-overs.
    """
    # A larger group is never slower, so the first one at a limit is found by halving.
    low, high = 1, video.steps + 1
    while low < high:
        middle = (low + high) // 2
        if limit(video, middle) is Limit.STEPS:
            low = middle + 1
        else:
            high = middle
    if low > video.steps:
        return video.steps, Limit.STEPS
    # One rank fewer is as good when the pace does not differ.
    is_faster = video.way(low).pace_s < video.way(low - 1).pace_s * (1 - _SAME)
    return (low if is_faster else low - 1), limit(video, low)
