"""Lays one video out on the chain of ranks: how many units each rank does. Pure code.

Ranks further down the chain stay further ahead: rank r has work for about r stairs more than rank 0. So a video
reaches each rank while that rank is still busy with the one before, and the work of a video spreads evenly. Whole units
follow from the times at which ranks are free, so that what rounding takes from a rank it gets back with the next video.

No rank works beyond the time at which all of them can end. Near that time the stairs are cut off from the top: the
last video runs on rank 0 alone, the one before ends on rank 1, and so on, each rank being filled to the end. For few
videos this is the wrap-around rule of R. McNaughton, "Scheduling with deadlines and loss functions" (1959).
"""

from bisect import bisect
from collections.abc import Sequence

from svdq.pipeline.planning.blocks import Block, common_end_s, fill


def spread(
    block: Block, *, first: int, free_s: Sequence[float], num_waiting: int, stair_s: float, apart_s: float = 0.0
) -> list[int]:
    """Lay out a video on a block of ranks; return the number of units done up to and with each.

    `first` is the first rank that may have work, `free_s` when each is free, and for `first` the video there. Each rank
    should be `stair_s` further ahead than the one before, and each of the last videos ends `apart_s` later than the one
    before; `num_waiting` like it wait.
    """
    row, ranks = block.row, block.ranks
    upto_s, slowness, num_units = row.upto_s, row.slowness, row.num_units
    total_s = upto_s[-1]
    # A rank that may not do the first units waits for them.
    arrivals_s = [free_s[first] + upto_s[least] * slowness[first] for least in block.least]
    free_s = [max(free_s[rank], arrivals_s[rank]) if rank > first else free_s[rank] for rank in ranks]
    # With fewer videos left than ranks, this one is the last of a rank: it ends there and fills it.
    enders = block.enders
    fills = num_waiting < len(enders)
    last = max(enders[num_waiting], first) if fills else ranks[-1]
    # The last units that a rank may not do come after it.
    backlog_s = [
        free_s[rank] + (total_s - upto_s[block.most[rank]]) * slowness[rank] + rank * apart_s
        for rank in range(last + 1)
    ]
    end_s = max(
        common_end_s(backlog_s, slowness[: last + 1], (num_waiting + 1) * total_s),
        free_s[first] + total_s * slowness[first],
    )
    until_s = []
    rest_s = total_s
    for rank in ranks:
        # The last video of each rank has one share on each rank before, and all the rest there.
        until_s.append(end_s - max(0.0, rest_s) * slowness[rank])
        rest_s -= block.share_s / slowness[rank]
    # A cheap last unit is left to the last rank: frames have 24 times the bytes of latents in half precision.
    cheap_s = min(row.typical_s, block.share_s)
    tail = num_units - (row.seconds(last, num_units - 1, num_units) < cheap_s)
    if fills:
        end_s -= num_waiting * apart_s
        until_s[last] = end_s
        tail = max(block.least[last], _nearest(upto_s, total_s - (end_s - free_s[last]) / slowness[last]))
        if last == first:
            tail = 0
    return _cut(block, first, last, tail, free_s, until_s, stair_s)


def _cut(
    block: Block, first: int, last: int, tail: int, free_s: Sequence[float], until_s: Sequence[float], stair_s: float
) -> list[int]:
    """Cut the row among the ranks from `first` to `last`, of which the last does at least the units from `tail` on."""
    row, num_units = block.row, block.row.num_units
    upto_s, slowness = row.upto_s, row.slowness
    busy_s = [*free_s]
    busy_s[last] += row.seconds(last, tail, num_units)
    filled_s = fill(
        busy_s, slowness, until_s, stair_s, range(first, last + 1), upto_s[tail],
        least_s=[upto_s[unit] for unit in block.least], most_s=[upto_s[unit] for unit in block.most],
    )  # fmt: skip
    cuts, done, done_s = [0] * first, 0, 0.0
    for rank in range(first, last):
        done_s += max(0.0, filled_s[rank - first] - busy_s[rank]) / slowness[rank]
        done = min(max(_nearest(upto_s, done_s), done, block.least[rank + 1]), block.most[rank], tail)
        cuts.append(done)
    cuts += [num_units] * (len(block.ranks) - last)
    if not cuts[first]:
        _start_early(block, cuts, first, tail, free_s, until_s)
    return cuts


def _start_early(
    block: Block, cuts: list[int], first: int, tail: int, free_s: Sequence[float], until_s: Sequence[float]
) -> None:
    """Fill the time for which the video would wait with units on the first rank, which is free."""
    begins = next(rank for rank in block.ranks if cuts[rank])
    idle_s = min(free_s[begins], until_s[first]) - free_s[first]
    fitting = bisect(block.row.upto_s, max(0.0, idle_s) / block.row.slowness[first]) - 1
    for rank in range(first, len(cuts)):
        cuts[rank] = max(cuts[rank], min(fitting, block.most[first], tail))


def _nearest(upto_s: Sequence[float], at_s: float) -> int:
    """Return the number of units that take nearest to so many seconds."""
    after = min(bisect(upto_s, at_s), len(upto_s) - 1)
    return after if after == 0 or upto_s[after] - at_s < at_s - upto_s[after - 1] else after - 1
