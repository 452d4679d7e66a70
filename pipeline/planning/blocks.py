"""Divides a video among blocks of ranks, each of which shares a fixed range of the units. Pure code.

Where every rank may do every unit, all ranks are one block. Ranks that are bound to a range of the units may be unable
to share evenly: some reach their last unit before they have done as much as the ranks behind them. There the video is
cut, and the ranks on either side of the cut are a block of their own.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Self

from svdq.pipeline.planning.binding import Bounds
from svdq.pipeline.planning.costs import Costs

_TOLERANCE = 1e-9  # rounding of floats, in seconds


class Row:
    """The costs of the successive units of a video: its encode, its steps and its decode."""

    def __init__(
        self, unit_s: Iterable[float], slowness: Sequence[float], is_skipped: Container[int] = frozenset()
    ) -> None:
        """Take the seconds of each unit on a typical rank, and how many times as long each rank takes.

        `is_skipped` has the units that go on with what the one before has left on its rank.
        """
        self.upto_s = [0.0, *accumulate(unit_s)]  # the seconds before each unit, and of all, on a typical rank
        self.slowness = slowness
        self._is_skipped = is_skipped

    @classmethod
    def of(cls, costs: Costs, steps: Sequence[float]) -> Self:
        """Return the row of a video with these relative costs of its steps; see `Segment`."""
        typical_s = median(costs.step_s)
        unit_s = [costs.encode_s, *(typical_s * step for step in costs.refined(steps)), costs.decode_s]
        is_skipped = {unit for unit, step in enumerate(steps, start=1) if not step}
        return cls(unit_s, [step_s / typical_s for step_s in costs.step_s], is_skipped)

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self.upto_s) - 1

    def cuts(self, first_unit: int) -> list[int]:
        """Return the units from `first_unit` on before which the video may pass to another rank."""
        return [unit for unit in range(first_unit, self.num_units) if unit not in self._is_skipped]

    @property
    def typical_s(self) -> float:
        """The median of the units that take time."""
        return median([later - earlier for earlier, later in pairwise(self.upto_s) if later > earlier] or [0.0])

    def seconds(self, rank: int, start: int, stop: int) -> float:
        """Return how long the units from `start` up to `stop` take on a rank."""
        return (self.upto_s[stop] - self.upto_s[start]) * self.slowness[rank]

    def part(self, marks: Sequence[int], ranks: range) -> "Row":
        """Return the row between the first and last of `marks`, cut only at these, for some ranks."""
        at_s = [self.upto_s[mark] for mark in marks]
        part = Row((), self.slowness[ranks.start : ranks.stop])
        part.upto_s = [each - at_s[0] for each in at_s]
        return part


@dataclass(frozen=True, kw_only=True)
class Block:
    """Successive ranks and their units of a video; ranks and units count from the first of the block."""

    #: The number of its first rank in the chain, and of its first unit in the video.
    rank: int
    unit: int
    row: Row
    least: Sequence[int]  # units that must be done before each rank, and that may be done with it
    most: Sequence[int]

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(len(self.least))

    @property
    def starters(self) -> list[int]:
        """The ranks that can do its first unit."""
        return [rank for rank in self.ranks if not self.least[rank] and self.most[rank]]

    @property
    def enders(self) -> list[int]:
        """The ranks that can do its last unit."""
        return [rank for rank in self.ranks if self.least[rank] < self.most[rank] == self.row.num_units]

    @property
    def share_s(self) -> float:
        """The seconds that each rank is busy when all are equally busy."""
        return self.row.upto_s[-1] / sum(1 / slowness for slowness in self.row.slowness)


def divide(row: Row, bounds: Sequence[Bounds]) -> list[Block]:
    """Divide ranks into blocks that have units of a `row`, down the chain, by the units that each rank may do."""
    firsts, stops = zip(*bounds, strict=True)
    num_units = row.num_units
    assert list(firsts) == sorted(firsts), bounds
    assert list(stops) == sorted(stops), bounds
    assert (firsts[0], stops[-1]) == (0, num_units), bounds
    assert all(first <= stop for first, stop in zip(firsts[1:], stops, strict=False)), bounds
    return [
        Block(
            rank=ranks.start,
            unit=start,
            row=row.part(range(start, stop + 1), ranks),
            least=[min(max(firsts[rank], start), stop) - start for rank in ranks],
            most=[max(min(stops[rank], stop), start) - start for rank in ranks],
        )
        for ranks, start, stop in _cut(row, firsts, stops)
    ]


def _cut(row: Row, least: Sequence[int], most: Sequence[int]) -> list[tuple[range, int, int]]:
    """Cut the chain where ranks cannot share evenly; return the ranks, first unit and end of each block."""
    ranks, upto_s, slowness = range(len(least)), row.upto_s, row.slowness
    if not least[-1] and most[0] == row.num_units:
        return [(ranks, 0, row.num_units)]
    # When each rank ends if all are as equally busy as the bounds allow.
    idle_s, endless_s = [0.0] * len(ranks), [float("inf")] * len(ranks)
    least_s, most_s = [upto_s[unit] for unit in least], [upto_s[unit] for unit in most]
    busy_s = fill(idle_s, slowness, endless_s, 0.0, ranks, upto_s[-1], least_s=least_s, most_s=most_s)
    blocks, rank, unit, done_s = [], 0, 0, 0.0
    for following in ranks[1:]:
        before = following - 1
        done_s += busy_s[before] / slowness[before]
        cut = min(least[following], most[before], key=lambda bound: abs(upto_s[bound] - done_s))
        is_even = abs(upto_s[cut] - done_s) > _TOLERANCE or abs(busy_s[following] - busy_s[before]) < _TOLERANCE
        if least[following] == most[before] or not is_even:
            if cut > unit:
                blocks.append((range(rank, following), unit, cut))
            rank, unit = following, cut
    return [*blocks, (range(rank, len(ranks)), unit, row.num_units)] if unit < row.num_units else blocks


def narrow(row: Row, bounds: Sequence[Bounds]) -> Sequence[Bounds]:
    """Bind ranks that may do units before and after a cut, where others may not, to one side of it.

    This lowers the throughput a little. In return, a few videos do not wait for each other at the ranks that could do
    both sides. The number of ranks on each side is chosen so that the slower side is as fast as possible.
    """
    upto_s = row.upto_s
    cuts = {first for first, _ in bounds} & {stop for _, stop in bounds}
    for cut in sorted(cuts - {0, row.num_units}):
        sides = []
        for at in range(1, len(bounds)):
            if bounds[at - 1][0] < cut <= bounds[at - 1][1] and bounds[at][0] <= cut < bounds[at][1]:
                before = sum(1 / slowness for slowness in row.slowness[:at])
                after = sum(1 / slowness for slowness in row.slowness[at:])
                sides.append((max(upto_s[cut] / before, (upto_s[-1] - upto_s[cut]) / after), at))
        if sides:
            at = min(sides)[1]
            before_cut = [(first, min(stop, cut)) for first, stop in bounds[:at]]
            bounds = [*before_cut, *((max(first, cut), stop) for first, stop in bounds[at:])]
    return bounds


def common_end_s(free_s: Iterable[float], slowness: Iterable[float], work_s: float) -> float:
    """Return when ranks that are free from `free_s` on and end together have done `work_s` seconds of a typical one."""
    rate = offset = end_s = 0.0
    for one_free_s, one_slowness in sorted(zip(free_s, slowness, strict=True)):
        # The rate is 0 for the first rank: the end is not before it is free.
        if rate and end_s <= one_free_s:
            break
        rate += 1 / one_slowness
        offset += one_free_s / one_slowness
        end_s = (work_s + offset) / rate
    return end_s


def fill(
    free_s: Sequence[float],
    slowness: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
    ranks: range,
    work_s: float,
    *,
    least_s: Sequence[float],
    most_s: Sequence[float],
    done_s: float = 0.0,
) -> list[float]:
    """Return up to when each of `ranks` is busy with `work_s` more, in seconds of a typical rank.

    Where an even fill misses a bound most, the bound is the best division, and the ranks on either side of it are
    filled on their own. `free_s` is when each rank is free, until `until_s` unless all are full, each `stair_s` further
    ahead than the one before. `done_s` is done before the first of `ranks`; `least_s` must be done before each rank,
    and `most_s` may be done up to and with it.
    """
    filled_s = _fill_evenly(free_s, slowness, until_s, stair_s, ranks, work_s)
    upto_s, worst_s, before, bound_s = done_s, _TOLERANCE, ranks.start, 0.0
    for rank, rank_s in zip(ranks[:-1], filled_s, strict=False):
        upto_s += max(0.0, rank_s - free_s[rank]) / slowness[rank]
        for limit_s, miss_s in ((least_s[rank + 1], least_s[rank + 1] - upto_s), (most_s[rank], upto_s - most_s[rank])):
            if miss_s > worst_s:
                worst_s, before, bound_s = miss_s, rank + 1, limit_s
    if before == ranks.start:
        return filled_s
    first, second = range(ranks.start, before), range(before, ranks.stop)
    left_s = done_s + work_s - bound_s
    bounds = {"least_s": least_s, "most_s": most_s}
    return [
        *fill(free_s, slowness, until_s, stair_s, first, bound_s - done_s, **bounds, done_s=done_s),
        *fill(free_s, slowness, until_s, stair_s, second, left_s, **bounds, done_s=bound_s),
    ]


def _fill_evenly(
    free_s: Sequence[float],
    slowness: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
    ranks: range,
    work_s: float,
) -> list[float]:
    """Give work to the ranks that are free first, in stairs of at most `stair_s` until `until_s`, the rest evenly."""
    events = []
    for rank in ranks:
        if free_s[rank] < until_s[rank]:
            events.append((free_s[rank] - rank * stair_s, 1 / slowness[rank]))
            events.append((until_s[rank] - rank * stair_s, -1 / slowness[rank]))
    events.sort()
    level_s = rate = 0.0
    left_s = work_s
    for at_s, change in events:
        risen_s = rate * (at_s - level_s)
        if risen_s >= left_s:
            level_s += left_s / rate if rate > 0 else 0.0
            return [max(free_s[rank], min(level_s + rank * stair_s, until_s[rank])) for rank in ranks]
        left_s -= risen_s
        level_s = at_s
        rate = max(0.0, rate + change)
    full_s = [max(free_s[rank], until_s[rank]) for rank in ranks]
    common_s = common_end_s(full_s, slowness[ranks.start : ranks.stop], left_s)
    return [max(common_s, rank_s) for rank_s in full_s]
