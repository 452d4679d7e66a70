"""The capacity model: what a number of GPUs achieves, given the costs of a video. Pure code.

Symbols are those of docs/internals/capacity.md: T steps of t seconds, E to encode, D to decode, X until a hand-over has
arrived, H that each rank spends a video on handing over; K ranks a group, G groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Protocol, Self

from svdq.pipeline.bench.report import batch_time_s
from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, fair_shares, fair_time_s

#: Paces this close to each other count as equal.
_SAME = 1e-6


class Limit(StrEnum):
    """The limit of a group's pace."""

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
    """A way to use GPUs: a number of groups of equal size that share one queue."""

    #: Its name.
    name: str
    #: G and K: one group of K ranks is the pipeline, G groups of one rank are replicas.
    groups: int
    ranks: int
    #: Seconds from the start of a group to its first video (the fill), and between two later videos.
    first_s: float
    pace_s: float

    @property
    def gpus(self) -> int:
        """Number of GPUs of all groups."""
        return self.groups * self.ranks

    @property
    def videos_an_hour(self) -> float:
        """Videos per hour once all groups are filled."""
        return 3600 * self.groups / self.pace_s

    def time_s(self, num_videos: int) -> float:
        """Return the seconds until the last of `num_videos` videos is done."""
        return batch_time_s(math.ceil(num_videos / self.groups), self.first_s, self.pace_s)

    def finished(self, after_s: float) -> int:
        """Return the number of videos that are done after `after_s` seconds."""
        if after_s < self.first_s:
            return 0
        return self.groups * (1 + math.floor((after_s - self.first_s) / self.pace_s + _SAME))

    def groups_needed(self, num_videos: int, deadline_s: float) -> int | None:
        """Return the number of such groups that finish the videos in time; None if no number does."""
        each = replace(self, groups=1).finished(deadline_s)
        return math.ceil(num_videos / each) if each else None


class Model(Protocol):
    """A model of what groups of GPUs can do."""

    @property
    def group_sizes(self) -> Sequence[int]:
        """The useful group sizes, ascending; the first is 1."""
        ...

    @property
    def measured_ranks(self) -> int | None:
        """Number of ranks of the measured group; None if no group was measured."""
        ...

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Return the performance of `groups` groups of `ranks` ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class VideoCosts:
    """The costs of a video of one shape."""

    #: T.
    steps: int
    #: t, E and D. A step's time for each measured GPU: a larger group has further GPUs like the median one, a smaller
    #: group goes without the slowest.
    costs: Costs
    #: X: seconds until a hand-over has reached the next rank. In parallel with computing, one at a time on a link.
    transfer_s: float = 0.0
    #: H: seconds per video that a rank spends on receiving, checking and sending.
    overhead_s: float = 0.0

    @property
    def group_sizes(self) -> range:
        """From 1 to the largest useful number of ranks."""
        return range(1, largest_useful(self)[0] + 1)

    @property
    def measured_ranks(self) -> int | None:
        """Number of measured step times, unless it is one."""
        return len(self.costs.step_s) if len(self.costs.step_s) > 1 else None

    def on(self, ranks: int) -> Costs:
        """Return the costs on a group of `ranks` ranks."""
        step_s = list(self.costs.step_s)
        while len(step_s) > ranks:
            step_s.remove(max(step_s))
        step_s += [median(self.costs.step_s)] * (ranks - len(step_s))
        return replace(self.costs, step_s=tuple(step_s))

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Return the performance of `groups` groups of `ranks` ranks, each with the GPUs of `on`."""
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
        """Return the costs with each part multiplied by a factor."""
        costs = Costs(
            step_s=tuple(step_s * step for step_s in self.costs.step_s),
            encode_s=self.costs.encode_s * encode,
            decode_s=self.costs.decode_s * decode,
        )
        return replace(self, costs=costs, transfer_s=self.transfer_s * transfer)


@dataclass(frozen=True, kw_only=True)
class GivenPace:
    """A group known only by its fill and its pace, and the time of one GPU."""

    #: K of the group.
    ranks: int
    #: Seconds of a video on one GPU.
    one_gpu_s: float
    #: Seconds to the group's first video, and between two later videos.
    fill_s: float
    pace_s: float

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """One, and the size of the group."""
        return (1, self.ranks) if self.ranks > 1 else (1,)

    @property
    def measured_ranks(self) -> int | None:
        """Number of ranks of the group."""
        return self.ranks

    def way(self, ranks: int, groups: int = 1) -> Way:
        """Return the performance of `groups` groups.

        Raises:
            InputError: groups of this size were not measured.
        """
        if ranks not in self.group_sizes:
            raise InputError(
                f"A group of {ranks} GPUs cannot be derived from the fill and pace of one of {self.ranks}; give "
                "--steps, --step-ms, --encode-ms and --decode-ms instead."
            )
        first_s, pace_s = (self.one_gpu_s,) * 2 if ranks == 1 else (self.fill_s, self.pace_s)
        return Way(name=name_of(ranks, groups), groups=groups, ranks=ranks, first_s=first_s, pace_s=pace_s)


def name_of(ranks: int, groups: int) -> str:
    """Return the name of a way to use GPUs."""
    if ranks == 1:
        return "one GPU" if groups == 1 else f"{groups} replicas"
    return f"pipeline of {ranks}" if groups == 1 else f"{groups} groups of {ranks}"


def limit(video: VideoCosts, ranks: int) -> Limit:
    """Return what limits the pace of a group of `ranks` ranks."""
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
    """Return the largest useful number of ranks in a group, and what makes more of them useless.

    Up to it each further GPU makes the group faster. The limit is where a link, the decode or the encode alone takes as
    long as everything else's share, or T ranks. A group of more ranks than steps works, too: the ranks take turns at
    having a step. But two groups of half the size are as fast with half the hand-overs.
    """
    # A larger group is never slower, so bisection finds the first one at a limit.
    low, high = 1, video.steps + 1
    while low < high:
        middle = (low + high) // 2
        if limit(video, middle) is Limit.STEPS:
            low = middle + 1
        else:
            high = middle
    if low > video.steps:
        return video.steps, Limit.STEPS
    # One rank fewer is as good if the pace is the same.
    is_faster = video.way(low).pace_s < video.way(low - 1).pace_s * (1 - _SAME)
    return (low if is_faster else low - 1), limit(video, low)
