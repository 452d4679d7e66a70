"""The capacity law: how long a number of GPUs takes for a number of videos. Pure code.

Symbols are as in docs/internals/capacity.md: T steps of t seconds, E to encode, D to decode, W = T·t + E + D, and K
ranks. Where ranks hold one of two experts each, K1 of them do T1 steps and K2 the other T2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from svdq.pipeline.planning.binding import Segment, step_costs
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.rounds import LOAD_SHARE


@dataclass(frozen=True, kw_only=True)
class VideoCosts:
    """The costs of a video of one shape."""

    #: T.
    steps: int
    #: Their relative costs, by which they count in T; none: each costs 1. See `Segment.costs`.
    step_costs: Sequence[float] = ()
    #: t, E and D. A step's time for each measured GPU: a larger group has further GPUs like the median one, a smaller
    #: group goes without the slowest.
    costs: Costs
    #: T1 and T2, if each rank of a pipeline holds one of two experts; None if every rank holds all of the model.
    segments: tuple[int, int] | None = None

    @classmethod
    def of(cls, segments: Sequence[Segment], costs: Costs) -> "VideoCosts":
        """Return the costs of a video whose steps are of one or two experts, of which each rank holds one."""
        steps = step_costs(segments)
        bound = (segments[0].stop, len(steps) - segments[0].stop) if len(segments) > 1 else None
        return cls(steps=len(steps), step_costs=steps, costs=costs, segments=bound)

    def work(self, stop: int | None = None) -> float:
        """Return the work of the steps before `stop`, or of all, in steps of cost 1."""
        steps = self.costs.refined(self.step_costs or [1.0] * self.steps)
        return sum(steps[:stop])

    def step_s(self, ranks: int) -> float:
        """Return the time of a step on `ranks` GPUs that share the steps by their speeds: the harmonic mean."""
        known = sorted(self.costs.step_s)[:ranks]
        steps_a_second = sum(1 / step_s for step_s in known) + (ranks - len(known)) / median(self.costs.step_s)
        return ranks / steps_a_second

    def video_s(self, ranks: int = 1) -> float:
        """Return W, the time of one video on a typical GPU of `ranks`."""
        return self.work() * self.step_s(ranks) + self.costs.encode_s + self.costs.decode_s

    def pace_s(self, ranks: int) -> float:
        """Return the seconds between two videos of a pipeline: W/K, but at least the time of the slower expert."""
        if self.segments is None or ranks == 1:
            return self.video_s(ranks) / ranks
        first_s, second_s = self._experts_s(ranks)
        first, second = self.division(ranks)
        return max(first_s / first, second_s / second)

    def rounds_pace_s(self, ranks: int) -> float:
        """Return the seconds between two videos of groups of one rank in rounds, if loading takes all that it may."""
        return self.video_s(ranks) / ranks * (1 + LOAD_SHARE)

    def faster_in_rounds(self, ranks: int) -> float:
        """Return the share by which groups of one rank in rounds are faster than a pipeline."""
        return self.pace_s(ranks) / self.rounds_pace_s(ranks) - 1

    def division(self, ranks: int) -> tuple[int, int]:
        """Return K1 and K2, with which the slower experts are as fast as possible; at least two ranks."""
        first_s, second_s = self._experts_s(ranks)
        numbers = ((first, ranks - first) for first in range(1, ranks))
        return min(numbers, key=lambda of: max(first_s / of[0], second_s / of[1]))

    def _experts_s(self, ranks: int) -> tuple[float, float]:
        """Return the seconds of each expert's ranks for a video: T1·t + E and T2·t + D."""
        assert self.segments is not None
        first_s = self.work(self.segments[0]) * self.step_s(ranks) + self.costs.encode_s
        return first_s, self.video_s(ranks) - first_s

    def time_s(self, ranks: int, num_videos: int) -> float:
        """Return the seconds until a pipeline has made `num_videos`: max(W, N·pace).

        Where experts are bound, the ranks of the second wait for the first video, and the last video for them.
        """
        if ranks == 1:
            return self.replicas_time_s(1, num_videos)
        if self.segments is None:
            return max(self.video_s(ranks), num_videos * self.pace_s(ranks))
        first_s, second_s = self._experts_s(ranks)
        first, second = self.division(ranks)
        return max(
            first_s + second_s, num_videos * first_s / first + second_s, first_s + num_videos * second_s / second
        )

    def replicas_time_s(self, ranks: int, num_videos: int) -> float:
        """Return the seconds until `ranks` replicas, of whole videos each, have made `num_videos`."""
        return math.ceil(num_videos / ranks) * self.video_s(ranks)

    def rounds_time_s(self, ranks: int, num_videos: int) -> float:
        """Return the same of groups of one rank in rounds, if loading takes all that it may."""
        return self.replicas_time_s(ranks, num_videos) * (1 + LOAD_SHARE)
