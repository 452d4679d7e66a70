"""Keeps what each rank has been given and has not finished, and forecasts when it is free. Pure code."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from svdq.pipeline.planning.costs import Costs

#: Seconds for which the reports of other ranks may be on their way: so long, work counts as finished when expected.
REPORT_LAG_S = 0.15


@dataclass(slots=True)
class RankWork:
    """What a rank still has to do of a sample."""

    rank: int
    num_steps: int
    encodes: bool
    decodes: bool
    #: When it should be finished, as of the last forecast.
    expected_s: float = math.inf


@dataclass(slots=True)
class InFlight:
    """What is left to do of a sample in flight."""

    shape: Hashable
    #: The fair share of each rank in it.
    share_s: list[float]
    #: When it is ready for its next rank, at the latest known.
    ready_s: float
    #: Whether rank 0 has yet to encode it between steps of other samples.
    to_encode: bool
    works: list[RankWork]


class Forecast:
    """The work in flight of a group of ranks."""

    def __init__(self, num_ranks: int) -> None:
        """Begin with idle ranks; `num_ranks` is K."""
        #: In the order of their admission.
        self.in_flight: dict[int, InFlight] = {}
        #: The latest costs of each shape of video.
        self.costs: dict[Hashable, Costs] = {}
        #: When each rank last finished something.
        self._finished_s = [0.0] * num_ranks

    def finished(self, index: int, rank: int, what: str, now: float) -> None:
        """Learn that a rank has finished the `encode`, the `steps` or the `decode` of a sample.

        Of a sample that is not known, nothing is learned.
        """
        sample = self.in_flight.get(index)
        if sample is None:
            return
        if sample.to_encode:
            sample.to_encode = False
            if what == "encode":
                sample.ready_s = now
                return
        # What ranks before have not reported yet is done, too.
        sample.works = [work for work in sample.works if work.rank >= rank]
        ended_s = now
        if sample.works and rank:
            ended_s = min(now, max(now - REPORT_LAG_S, sample.works[0].expected_s))
        self._finished_s[rank] = sample.ready_s = ended_s
        for work in sample.works[:1]:
            work.encodes = False
            if what != "encode":
                work.num_steps = 0
            if what == "decode" or not (work.num_steps or work.decodes):
                del sample.works[0]
        if not sample.works:
            self.ended(index)

    def ended(self, index: int) -> None:
        """Forget a sample."""
        self.in_flight.pop(index, None)

    def free_s(self, now: float) -> tuple[list[float], float]:
        """Return when each rank has done what it was given, and when rank 0 has encoded what starts on other ranks."""
        free_s = [*self._finished_s]
        # What is not finished when expected takes longer, or its report is on its way.
        earliest_s = [now, *[now - REPORT_LAG_S] * (len(free_s) - 1)]
        encoded_s = now
        encodes_s = 0.0
        for sample in self.in_flight.values():
            costs = self.costs[sample.shape]
            step_s = costs.step_s
            at_s = sample.ready_s
            if sample.to_encode:
                encodes_s += costs.encode_s
                encoded_s += costs.encode_s
                at_s = encoded_s
            for work in sample.works:
                rank = work.rank
                # Comparisons: a call of max takes longer than all of the rest, and there may be 100 works.
                if at_s < free_s[rank]:
                    at_s = free_s[rank]
                at_s += work.num_steps * step_s[rank]
                if work.encodes:
                    at_s += costs.encode_s
                if work.decodes:
                    at_s += costs.decode_s * costs.slowness(rank)
                if at_s < earliest_s[rank]:
                    at_s = earliest_s[rank]
                free_s[rank] = work.expected_s = at_s
        free_s = [max(rank_s, now) for rank_s in free_s]
        free_s[0] += encodes_s
        return free_s, encoded_s
