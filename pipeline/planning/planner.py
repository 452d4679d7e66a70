"""Plans which rank does which units of each video. Pure code: no torch, and times are arguments.

A video is a row of units: its encode, its T denoising steps and its decode. The plan cuts the row into consecutive
pieces, one for each rank. A video is admitted when a rank can start it soon, and is then laid out over that rank and
the ranks behind it, by the forecast of when each of them is free. Ranks may be bound to a range of the units.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from svdq.pipeline.planning.binding import Bounds
from svdq.pipeline.planning.blocks import Block, Row, divide, narrow
from svdq.pipeline.planning.spread import spread

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


#: How much further ahead each rank is than the one before, in fair shares: one is the rank's part of a video, the rest
#: covers units that exceed a share, whole steps and disturbances.
STAIR_SHARES = 1.8
MAX_STAIR_SHARES = 3.0  # the most for the sake of steps that are longer than a share: more would only be kept in memory
#: How much later each of the last videos reaches the next block than the one before, in fair shares. A rank works on
#: what has arrived: if a later video came first, the one before would wait for all of its work.
APART_SHARES = 0.3
#: Seconds of work to which very short steps are put together while many videos wait: to take over a video and to hand
#: it on costs a rank about a millisecond, however short its steps are.
MIN_STAGE_S = 0.02
LEAD_S = 0.05  # seconds in which a video is taken from the queue and sent to the rank that begins it


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """Ranks for which videos should be admitted neither too late nor too early."""

    ranks: range
    least_s: float  # the least seconds from the admission of a video until it reaches them
    ahead_s: float  # how many seconds of work they should have in advance


class Planner:
    """Assigns videos to ranks as they are admitted."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._forecast = Forecast(num_ranks)
        #: The ranks that can start the latest new video, and those behind them that must have room for it.
        self._starters: Sequence[int] = range(num_ranks)
        self._reach: list[_Reach] = []

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next video should be admitted: a rank can start it soon.

        Where ranks are bound to the units that cost most, it also waits until these have room: videos would pile up
        before them, and a job of a high priority would wait behind all of these.
        """
        free_s = self._forecast.free_s(now)
        wanted_s = min(free_s[rank] for rank in self._starters) - LEAD_S
        for reach in self._reach:
            room_s = min(free_s[rank] for rank in reach.ranks) - reach.ahead_s
            # Otherwise they have little left to do before what is on its way reaches them.
            if room_s > max(free_s[: reach.ranks.start]):
                wanted_s = max(wanted_s, room_s - reach.least_s)
        return max(0.0, wanted_s - now)

    def admit(
        self,
        index: int,
        row: Row,
        *,
        shape: Hashable,
        num_waiting: int,
        now: float,
        first_unit: int = 0,
        bounds: Sequence[Bounds] | None = None,
    ) -> tuple[int, ...]:
        """Assign the next video, with the estimated costs of its units in `row`; `num_waiting` jobs wait after it.

        Returns K+1 boundaries in its row of units: rank r does units boundaries[r] up to, not including, the next.
        Ranks work on the lowest `index` first, videos of one `shape` cost the same, and a resumed one goes on at
        `first_unit`. Without `bounds`, nondecreasing down the chain, every rank may do every unit.
        """
        num_ranks, num_units = self._num_ranks, row.num_units
        self._forecast.rows[shape] = row
        free_s = self._forecast.free_s(now)
        if bounds is None:
            marks = _marks(row, first_unit, num_ranks, many=num_waiting >= num_ranks)
            bounds = [(0, len(marks) - 1)] * num_ranks
        else:
            marks = [*row.cuts(first_unit), num_units]
            if len(self._forecast.in_flight) + num_waiting < num_ranks:
                bounds = narrow(row, bounds)
            bounds = [(bisect_left(marks, first), bisect_left(marks, stop)) for first, stop in bounds]
        left, last = row.part(marks, range(num_ranks)), len(marks) - 1
        boundaries, share_s = [0], [0.0] * num_ranks
        ready_s, reach = now, []
        for block in divide(left, bounds):
            ranks = range(block.rank, block.rank + len(block.ranks))
            # The rank that is free first; of those within half a step, or free when the video is ready, the last.
            starters = [block.rank + rank for rank in block.starters]
            soon_s = max(min(free_s[rank] for rank in starters) + block.row.typical_s / 2, ready_s)
            first = max(rank for rank in starters if free_s[rank] <= soon_s)
            free_s[first] = max(free_s[first], ready_s)
            stair_s = self._stair_s(block)
            if block.unit:
                least_s = left.upto_s[block.unit] * min(left.slowness)
                reach.append(_Reach(ranks=ranks, least_s=least_s, ahead_s=stair_s))
            elif not first_unit:
                self._starters = starters
            cuts = spread(
                block,
                first=first - block.rank,
                free_s=free_s[ranks.start : ranks.stop],
                num_waiting=num_waiting,
                stair_s=stair_s,
                apart_s=0.0 if block.unit + block.row.num_units == last else APART_SHARES * block.share_s,
            )
            boundaries += [boundaries[-1]] * (block.rank + 1 - len(boundaries))
            ready_s = free_s[first]
            for rank, cut in zip(ranks, cuts, strict=True):
                share_s[rank] = block.share_s
                boundaries.append(block.unit + cut)
                if boundaries[-2] < boundaries[-1]:
                    ready_s = max(ready_s, free_s[rank]) + left.seconds(rank, *boundaries[-2:])
        boundaries += [last] * (num_ranks + 1 - len(boundaries))
        if not first_unit:
            self._reach = reach
        assert boundaries == sorted(boundaries), "samples go down the chain only"
        units = tuple(marks[cut] for cut in boundaries)
        works = [RankWork(rank, start, stop) for rank, (start, stop) in enumerate(pairwise(units)) if start < stop]
        self._forecast.in_flight[index] = InFlight(shape, share_s, now, works)
        return units

    def finished(self, index: int, rank: int, unit: int, now: float) -> None:
        """Learn that a rank has finished the units of a video before `unit`, if the video is known."""
        self._forecast.finished(index, rank, unit, now)

    def ended(self, index: int) -> None:
        """Forget a video, which is decoded, has failed or was canceled."""
        self._forecast.ended(index)

    def _stair_s(self, block: Block) -> float:
        """Return how much further each rank of a block should be ahead than the one before, in seconds."""
        # The largest video in flight needs the highest stairs. With few steps, a step exceeds the rest of a stair.
        in_flight = self._forecast.in_flight.values()
        large_s = max([block.share_s, *(sample.share_s[block.rank] for sample in in_flight)])
        step_s = block.row.typical_s * max(block.row.slowness)
        return max(STAIR_SHARES * large_s, min(large_s + step_s, MAX_STAIR_SHARES * large_s))


def _marks(row: Row, first_unit: int, num_ranks: int, *, many: bool) -> list[int]:
    """Return the units before which a video may be cut, where very short ones stay together, and its end."""
    cuts, work_s = row.cuts(first_unit), row.upto_s[-1] - row.upto_s[first_unit]
    together = 1
    if many and work_s / num_ranks < MIN_STAGE_S:
        together = math.ceil(len(cuts) / max(1, round(work_s / MIN_STAGE_S)))
    return [*cuts[:-1:together], cuts[-1], row.num_units]
