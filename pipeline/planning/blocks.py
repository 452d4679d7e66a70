"""Divides a sample among blocks of ranks, each of which shares a fixed range of the steps. Pure code.

Where every rank may do every step, all ranks are one block. Ranks that are bound to a range of the steps may be unable
to share evenly: some reach their last step before they have done as much as the ranks behind them. There the sample is
cut, and the ranks on either side of the cut are a block of their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from svdq.pipeline.planning.costs import Costs

#: Rounding of floats, in steps and in seconds.
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Block:
    """Successive ranks, and what they do of a sample; ranks and steps count from the first of the block."""

    #: The number of its first rank in the chain, and of its first step in the sample.
    rank: int
    step: int
    #: Denoising steps.
    num_steps: int
    #: Of its ranks; in all blocks but the last, decoding is free.
    costs: Costs
    #: Ranks that can do its last step and, in the last block, decode; ascending. The ranks after the last of them do
    #: nothing of this block.
    enders: Sequence[int]
    #: How many of the steps must be done before each rank.
    least: Sequence[int]
    #: How many may be done up to and with each rank; infinite for ranks that may do the last step.
    most: Sequence[float]

    @property
    def ranks(self) -> range:
        """The ranks that can do something."""
        return range(self.enders[-1] + 1)

    @property
    def starters(self) -> list[int]:
        """The ranks that can do its first step, or end it if there is none."""
        return [rank for rank in self.ranks if not self.least[rank] and self.most[rank]]

    @property
    def num_steps_worth(self) -> float:
        """The steps and the decode, in steps."""
        costs = self.costs
        decodes = [costs.decode_s * costs.slowness(rank) / costs.step_s[rank] for rank in self.enders]
        return self.num_steps + sum(decodes) / len(decodes)

    def share_s(self, encode_s: float) -> float:
        """Return the seconds that each rank is busy when all are equally busy, the first one also with an encode."""
        step_s = self.costs.step_s
        return (self.num_steps_worth + encode_s / step_s[0]) / sum(1 / step_s[rank] for rank in self.ranks)


def divide(
    bounds: Sequence[tuple[int, int]],
    first_step: int,
    num_steps: int,
    costs: Costs,
    decoders: Sequence[int],
    *,
    encodes: bool,
) -> list[Block]:
    """Divide ranks into blocks.

    Args:
        bounds: the steps (first, stop) that each rank may do, nondecreasing; together all of 0 to T.
        first_step: the first step that is left to do.
        num_steps: T.
        costs: of the sample.
        decoders: the ranks that can decode it, ascending; the last one must be able to do the last step.
        encodes: whether rank 0 encodes it.

    Returns:
        The blocks that have steps, down the chain, and the one that decodes.
    """
    _check(bounds, num_steps)
    assert bounds[decoders[-1]][1] == num_steps, "a rank that decodes may do the last step"
    ranks = range(decoders[-1] + 1)
    left = num_steps - first_step
    least = [min(max(bounds[rank][0] - first_step, 0), left) for rank in ranks]
    most = [
        math.inf if bounds[rank][1] == num_steps else min(max(bounds[rank][1] - first_step, 0), left) for rank in ranks
    ]
    step_s = costs.step_s
    if not least[-1] and most[0] == math.inf:
        blocks = [(ranks, 0, left)]
    else:
        worth = left + costs.decode_s * len(step_s) / sum(step_s)
        blocks = _cut(least, most, left, worth, step_s, costs.encode_s if encodes else 0.0)
    return [
        Block(
            rank=block.start,
            step=first_step + start,
            num_steps=stop - start,
            costs=Costs(
                step_s=step_s[block.start : block.stop],
                encode_s=0.0 if block.start else costs.encode_s,
                decode_s=costs.decode_s if block.stop == len(ranks) else 0.0,
            ),
            enders=[
                rank - block.start
                for rank in block
                if most[rank] >= stop and (block.stop < len(ranks) or rank in decoders)
            ],
            least=[max(least[rank] - start, 0) for rank in block],
            most=[math.inf if most[rank] >= stop else max(most[rank] - start, 0) for rank in block],
        )
        for block, start, stop in blocks
    ]


def _cut(
    least: Sequence[int],
    most: Sequence[float],
    num_steps: int,
    worth: float,
    step_s: Sequence[float],
    encode_s: float,
) -> list[tuple[range, int, int]]:
    """Cut the chain where ranks cannot share evenly; return the ranks, first step and end of each block."""
    ranks = range(len(least))
    free_s = [0.0] * len(ranks)
    free_s[0] = encode_s
    # When each rank ends if all are as equally busy as the bounds allow.
    busy_s = fill(free_s, step_s, [math.inf] * len(ranks), 0.0, ranks, worth, least=least, most=most)
    blocks, rank, step, done = [], 0, 0, 0.0
    for following in ranks[1:]:
        before = following - 1
        done += max(0.0, busy_s[before] - free_s[before]) / step_s[before]
        cut = min(least[following], most[before], key=lambda bound: abs(bound - done))
        is_even = abs(cut - done) > _TOLERANCE or abs(busy_s[following] - busy_s[before]) < _TOLERANCE
        if least[following] == most[before] or not is_even:
            if cut > step:
                blocks.append((range(rank, following), step, int(cut)))
            rank, step = following, int(cut)
    return [*blocks, (range(rank, len(ranks)), step, num_steps)]


def narrow(bounds: Sequence[tuple[int, int]], num_steps: int, step_s: Sequence[float]) -> Sequence[tuple[int, int]]:
    """Bind ranks that may do steps before and after a cut, where others may not, to one side of it.

    This lowers the throughput a little. In return, a few videos do not wait for each other at the ranks that could do
    both sides. The number of ranks on each side is chosen so that the slower side is as fast as possible.

    Args:
        bounds: as for `divide`, of the ranks up to the last that can decode.
        num_steps: T.
        step_s: seconds of a step on each rank.
    """
    cuts = {first for first, _ in bounds} & {stop for _, stop in bounds}
    for cut in sorted(cuts - {0, num_steps}):
        sides = []
        for at in range(1, len(bounds)):
            if bounds[at - 1][0] < cut < bounds[at][1]:
                before = sum(1 / rank_s for rank_s in step_s[:at])
                after = sum(1 / rank_s for rank_s in step_s[at : len(bounds)])
                sides.append((max(cut / before, (num_steps - cut) / after), at))
        if sides:
            at = min(sides)[1]
            before_cut = [(first, min(stop, cut)) for first, stop in bounds[:at]]
            bounds = [*before_cut, *((max(first, cut), stop) for first, stop in bounds[at:])]
    return bounds


def _check(bounds: Sequence[tuple[int, int]], num_steps: int) -> None:
    """Assert that ranks may do all steps of a sample in the order of the chain."""
    firsts, stops = zip(*bounds, strict=True)
    assert list(firsts) == sorted(firsts), bounds
    assert list(stops) == sorted(stops), bounds
    assert (firsts[0], stops[-1]) == (0, num_steps), bounds
    assert all(first <= stop for first, stop in zip(firsts[1:], stops, strict=False)), bounds


def common_end_s(free_s: Iterable[float], step_s: Iterable[float], num_steps: float) -> float:
    """Return when ranks that are free from `free_s` on and end together have done `num_steps`."""
    rate = offset = end_s = 0.0
    for one_free_s, one_step_s in sorted(zip(free_s, step_s, strict=True)):
        # The rate is 0 for the first rank: the end is not before it is free.
        if rate and end_s <= one_free_s:
            break
        rate += 1 / one_step_s
        offset += one_free_s / one_step_s
        end_s = (num_steps + offset) / rate
    return end_s


def fill(
    free_s: Sequence[float],
    step_s: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
    ranks: range,
    num_steps: float,
    *,
    least: Sequence[int],
    most: Sequence[float],
    done: float = 0.0,
) -> list[float]:
    """Return up to when each of `ranks` is busy with `num_steps` more.

    Where an even fill misses a bound most, the bound is the best division, and the ranks on either side of it are
    filled on their own.

    Args:
        free_s: when each rank is free.
        step_s: seconds of a step on each rank.
        until_s: beyond which time a rank is filled only when all are full.
        stair_s: how much further each rank should be ahead than the one before.
        ranks: the ranks to fill.
        num_steps: how many steps they do.
        least: how many steps must be done before each rank, nondecreasing.
        most: how many may be done up to and with each rank, nondecreasing; infinite if it may do the last step.
        done: steps done before the first of `ranks`.
    """
    filled_s = _fill_evenly(free_s, step_s, until_s, stair_s, ranks, num_steps)
    # Bounds are nondecreasing, so the last rank may do the first step and the first rank the last one.
    if not least[-1] and most[0] == math.inf:
        return filled_s
    upto, worst, before, bound = done, _TOLERANCE, ranks.start, 0.0
    for rank, rank_s in zip(ranks[:-1], filled_s, strict=False):
        upto += max(0.0, rank_s - free_s[rank]) / step_s[rank]
        for limit, miss in ((least[rank + 1], least[rank + 1] - upto), (most[rank], upto - most[rank])):
            if miss > worst:
                worst, before, bound = miss, rank + 1, limit
    if before == ranks.start:
        return filled_s
    first, second = range(ranks.start, before), range(before, ranks.stop)
    left = done + num_steps - bound
    return [
        *fill(free_s, step_s, until_s, stair_s, first, bound - done, least=least, most=most, done=done),
        *fill(free_s, step_s, until_s, stair_s, second, left, least=least, most=most, done=bound),
    ]


def _fill_evenly(
    free_s: Sequence[float],
    step_s: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
    ranks: range,
    num_steps: float,
) -> list[float]:
    """Fill the ranks that are free first, each `stair_s` after the one before and none beyond `until_s`.

    What is left when all are full is spread evenly.
    """
    events = []
    for rank in ranks:
        if free_s[rank] < until_s[rank]:
            events.append((free_s[rank] - rank * stair_s, 1 / step_s[rank]))
            events.append((until_s[rank] - rank * stair_s, -1 / step_s[rank]))
    events.sort()
    level_s = rate = 0.0
    left = num_steps
    for at_s, change in events:
        risen = rate * (at_s - level_s)
        if risen >= left:
            level_s += left / rate if rate > 0 else 0.0
            return [max(free_s[rank], min(level_s + rank * stair_s, until_s[rank])) for rank in ranks]
        left -= risen
        level_s = at_s
        rate = max(0.0, rate + change)
    full_s = [max(free_s[rank], until_s[rank]) for rank in ranks]
    common_s = common_end_s(full_s, step_s[ranks.start : ranks.stop], left)
    return [max(common_s, rank_s) for rank_s in full_s]
