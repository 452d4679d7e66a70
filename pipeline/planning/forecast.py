"""Keeps the unfinished work of each rank, and forecasts when the rank is free. Pure code."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from svdq.pipeline.planning.blocks import Row

REPORT_LAG_S = 0.15  # reports of other ranks may be on their way so long; work then counts as expected


@dataclass(slots=True)
class RankWork:
    """The unfinished units of a sample on one rank: from `start` up to `stop`."""

    rank: int
    start: int
    stop: int
    expected_s: float = math.inf  # when it should be finished, as of the last forecast


@dataclass(slots=True)
class InFlight:
    """The unfinished work of a sample in flight."""

    shape: Hashable
    share_s: list[float]  # the fair share of each rank in it
    ready_s: float  # when it is ready for its next rank, at the latest known
    works: list[RankWork]


class Forecast:
    """The work in flight of a group of ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.in_flight: dict[int, InFlight] = {}  # in the order of their admission
        self.rows: dict[Hashable, Row] = {}  # the latest costs of each shape of video
        self._finished_s = [0.0] * num_ranks  # when each rank last finished something

    def finished(self, index: int, rank: int, unit: int, now: float) -> None:
        """Learn that a rank has finished the units of a sample before `unit`, if the sample is known."""
        sample = self.in_flight.get(index)
        if sample is None:
            return
        # Work of the ranks before is done, too, although its report may not have arrived.
        sample.works = [work for work in sample.works if work.rank >= rank]
        ended_s = now
        if sample.works and rank:
            ended_s = min(now, max(now - REPORT_LAG_S, sample.works[0].expected_s))
        self._finished_s[rank] = sample.ready_s = ended_s
        if sample.works:
            sample.works[0].start = unit
            if unit >= sample.works[0].stop:
                del sample.works[0]
        if not sample.works:
            self.ended(index)

    def ended(self, index: int) -> None:
        """Forget a sample."""
        self.in_flight.pop(index, None)

    def free_s(self, now: float) -> list[float]:
        """Return when each rank has finished its work."""
        free_s = [*self._finished_s]
        # Work that is not finished when expected takes longer, or its report is on its way.
        earliest_s = [now, *[now - REPORT_LAG_S] * (len(free_s) - 1)]
        for sample in self.in_flight.values():
            row = self.rows[sample.shape]
            upto_s, slowness = row.upto_s, row.slowness
            at_s = sample.ready_s
            for work in sample.works:
                rank = work.rank
                # Comparisons: a call of max takes longer than all of the rest, and there may be 100 works.
                if at_s < free_s[rank]:
                    at_s = free_s[rank]
                at_s += (upto_s[work.stop] - upto_s[work.start]) * slowness[rank]
                if at_s < earliest_s[rank]:
                    at_s = earliest_s[rank]
                free_s[rank] = work.expected_s = at_s
        return [max(rank_s, now) for rank_s in free_s]
