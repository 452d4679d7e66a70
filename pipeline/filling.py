"""Fills ranks with steps like vessels with water: evenly, or each up to its own stair. Pure code."""

import math
from collections.abc import Iterable, Sequence

#: Steps by which a fill may miss a bound: rounding of floats.
_TOLERANCE = 1e-9


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
    """Fill ranks like stairs into which water runs, none beyond `until_s`; what is left then is spread evenly."""
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
