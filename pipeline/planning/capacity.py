"""The capacity law: how long a number of GPUs takes for a number of videos. Pure code.

Symbols are those of docs/internals/capacity.md: T steps of t seconds, E to encode, D to decode, W = T·t + E + D, and K
ranks. Where ranks hold one of two experts each, K1 of them do T1 steps and K2 the other T2.
"""

import math
from dataclasses import dataclass
from statistics import median

from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.rounds import LOAD_SHARE

MOST_GPUS = 512  # largest number of GPUs that a plan considers


@dataclass(frozen=True, kw_only=True)
class VideoCosts:
    """The costs of a video of one shape."""

    #: T.
    steps: int
    #: t, E and D. A step's time for each measured GPU: a larger group has further GPUs like the median one, a smaller
    #: group goes without the slowest.
    costs: Costs
    #: T1 and T2, if each rank of a pipeline holds one of two experts; None if every rank holds all of the model.
    segments: tuple[int, int] | None = None

    def step_s(self, ranks: int) -> float:
        """Return the time of a step on `ranks` GPUs that share the steps by their speeds: the harmonic mean."""
        known = sorted(self.costs.step_s)[:ranks]
        steps_a_second = sum(1 / step_s for step_s in known) + (ranks - len(known)) / median(self.costs.step_s)
        return ranks / steps_a_second

    def video_s(self, ranks: int = 1) -> float:
        """Return W, the time of one video on a typical GPU of `ranks`."""
        return self.steps * self.step_s(ranks) + self.costs.encode_s + self.costs.decode_s

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
        first_s = self.segments[0] * self.step_s(ranks) + self.costs.encode_s
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


@dataclass(frozen=True, kw_only=True)
class CapacityQuestion:
    """The work to be done, and the available resources."""

    videos: int  # number of videos N
    deadline_s: float | None = None  # seconds available; None without a deadline
    gpus: int | None = None  # number of GPUs; None: as many as the deadline needs, else 1
    gpu_hour_price: float | None = None  # price of a GPU hour in any currency


@dataclass(frozen=True, kw_only=True)
class CapacityRow:
    """The result of one layout; names of fields are those of the JSON."""

    layout: str  # "one GPU", "pipeline of 7", "pipeline of 3 + 4", "7 replicas" or "7 in rounds"
    gpus: int
    #: Seconds between two videos, and until all are done.
    pace_s: float
    time_s: float
    videos_an_hour: float
    in_time: bool | None  # whether it is done in time; None without a deadline
    #: Total cost and cost per video; None without a price.
    cost: float | None
    cost_a_video: float | None


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The answer."""

    question: CapacityQuestion
    gpus: int  # number of GPUs of the pipeline
    rows: tuple[CapacityRow, ...]  # one GPU, the pipeline, replicas, and what the deadline needs, without duplicates
    fewest: int | None  # GPUs of a pipeline that meets the deadline; None: no deadline or no such number


def make_plan(video: VideoCosts, question: CapacityQuestion) -> CapacityPlan:
    """Answer a planning question."""
    num_videos = question.videos
    fewest = None
    if question.deadline_s is not None:
        numbers = range(1, MOST_GPUS + 1)
        fewest = next((ranks for ranks in numbers if video.time_s(ranks, num_videos) <= question.deadline_s), None)
    gpus = question.gpus or fewest or 1
    layouts = {"one GPU": (1, video.video_s(), video.time_s(1, num_videos))}
    if gpus > 1:
        layouts |= {
            _pipeline_of(video, gpus): (gpus, video.pace_s(gpus), video.time_s(gpus, num_videos)),
            f"{gpus} replicas": (gpus, video.video_s(gpus) / gpus, video.replicas_time_s(gpus, num_videos)),
        }
    if video.segments is not None:
        layouts[f"{gpus} in rounds"] = (gpus, video.rounds_pace_s(gpus), video.rounds_time_s(gpus, num_videos))
    if fewest is not None and fewest > 1:
        layouts[_pipeline_of(video, fewest)] = (fewest, video.pace_s(fewest), video.time_s(fewest, num_videos))
    return CapacityPlan(
        question=question,
        gpus=gpus,
        rows=tuple(_row(name, *layout, question) for name, layout in layouts.items()),
        fewest=fewest,
    )


def _pipeline_of(video: VideoCosts, gpus: int) -> str:
    return f"pipeline of {gpus if video.segments is None else ' + '.join(map(str, video.division(gpus)))}"


def _row(layout: str, gpus: int, pace_s: float, time_s: float, question: CapacityQuestion) -> CapacityRow:
    price = question.gpu_hour_price
    cost = None if price is None else gpus * time_s / 3600 * price
    return CapacityRow(
        layout=layout,
        gpus=gpus,
        pace_s=pace_s,
        time_s=time_s,
        videos_an_hour=3600 / pace_s,
        in_time=None if question.deadline_s is None else time_s <= question.deadline_s,
        cost=cost,
        cost_a_video=None if cost is None else cost / question.videos,
    )
