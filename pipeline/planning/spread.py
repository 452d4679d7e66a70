"""Lays one sample out on the chain of ranks: how many steps each rank does, and which rank decodes. Pure code.

Ranks further down the chain stay further ahead: rank r has work for about r stairs more than rank 0. So a sample
reaches each rank while that rank is still busy with the sample before, and the work of a sample spreads evenly. Whole
steps follow from the times at which ranks are free, so that what rounding takes from a rank it gets back with the next
sample.

No rank works beyond the time at which all of them can end. Near that time the stairs are cut off from the top: the
last sample runs on rank 0 alone, the one before ends on rank 1, and so on, each rank being filled to the end. For few
samples this is the wrap-around rule of R. McNaughton, "Scheduling with deadlines and loss functions" (1959).
"""

from collections.abc import Sequence

from svdq.pipeline.planning.blocks import Block, common_end_s, fill

#: How much more than the end of the common time weighs than the same time elsewhere, squared.
_OVERTIME_WEIGHT = 10.0


def spread(
    block: Block,
    *,
    first: int,
    free_s: Sequence[float],
    num_waiting: int,
    share_s: float,
    stair_s: float,
    apart_s: float = 0.0,
) -> tuple[list[int], int]:
    """Lay out a sample on a block of ranks, which count from 0.

    Args:
        block: ranks, and what they do of it.
        first: the rank on which it starts.
        free_s: when each rank is free, and for `first` the sample there.
        num_waiting: samples like it that wait after this one.
        share_s: the fair share of each rank in it.
        stair_s: how much further each rank should be ahead than the one before.
        apart_s: how much later each of the last samples ends than the one before.

    Returns:
        The number of steps of each rank, up to the last that has some, and the rank that decodes.
    """
    costs, num_steps, ranks = block.costs, block.num_steps, block.ranks
    if not num_steps:
        return [0], min(rank for rank in block.enders if rank >= first)
    step_s, decode_s = costs.step_s, [costs.decode_s * costs.slowness(rank) for rank in ranks]
    # A rank that may not do the first steps waits for them.
    if block.least[-1]:
        arrivals_s = [free_s[first] + least * step_s[first] for least in block.least]
        free_s = [max(free_s[rank], arrivals_s[rank]) if rank > first else free_s[rank] for rank in range(len(free_s))]
    # With fewer samples left than ranks, this one is the last of a rank: it ends there and fills it.
    enders = [rank for rank in ranks if block.most[rank] >= num_steps]
    fills = num_waiting < len(enders)
    last = max(enders[num_waiting], first) if fills else ranks[-1]
    # Idle ranks before the first are free for the samples after this one, when their photos are encoded.
    backlog_s = [*free_s[: last + 1]]
    for rank in range(first):
        backlog_s[rank] = max(free_s[rank], free_s[first] + min(num_waiting, first - rank) * costs.encode_s)
    backlog_s[0] += max(0, num_waiting - first) * costs.encode_s
    # What a rank may not do of the last steps comes after it.
    for rank in range(last + 1):
        backlog_s[rank] += max(0.0, num_steps - block.most[rank]) * step_s[rank] + rank * apart_s
    end_s = max(
        common_end_s(backlog_s, step_s[: last + 1], (num_waiting + 1) * block.num_steps_worth),
        free_s[first] + num_steps * step_s[first] + min(decode_s[rank] for rank in block.enders),
    )
    until_s = []
    steps_of_last = float(num_steps)
    for rank in ranks:
        # The last sample of each rank does one share on each rank before, and all the rest there.
        until_s.append(end_s - decode_s[rank] - max(0.0, steps_of_last) * step_s[rank])
        steps_of_last -= share_s / step_s[rank]
    if fills:
        end_s -= num_waiting * apart_s
        decoder = min((rank for rank in block.enders if rank >= last), key=lambda rank: (rank != last, free_s[rank]))
        room_s = end_s - free_s[last] - decode_s[decoder]
        room = int(room_s / step_s[last] + 0.5)
        tail = max(0, min(num_steps - block.least[last], room)) if last > first else num_steps
        until_s[last] = end_s
        steps = _spread_steps(block, first, last, decoder, tail, free_s, until_s, stair_s)
        return steps, decoder
    best: tuple[float, list[int], int] | None = None
    ideal_s = fill(
        free_s, step_s, [end_s] * len(ranks), stair_s, ranks[first:], block.num_steps_worth,
        least=block.least, most=block.most,
    )  # fmt: skip
    decoders = block.enders
    if costs.decode_s < step_s[0]:
        # Whole steps balance as well, and frames have 24 times the bytes of latents in half precision.
        decoders = decoders[-1:]
    for decoder in decoders:
        if decoder < first:
            continue
        steps = _spread_steps(block, first, decoder, decoder, 0, free_s, until_s, stair_s)
        at_s, score = free_s[first], 0.0
        for rank in ranks[first:]:
            after_s = free_s[rank]
            if rank <= decoder and (steps[rank] or rank == decoder):
                at_s = max(at_s, after_s) + steps[rank] * step_s[rank]
                if rank == decoder:
                    at_s += decode_s[rank]
                after_s = at_s
            score += (after_s - ideal_s[rank - first]) ** 2 + _OVERTIME_WEIGHT * max(0.0, after_s - end_s) ** 2
        if best is None or score <= best[0]:
            best = score, steps, decoder
    assert best is not None
    return best[1], best[2]


def _spread_steps(
    block: Block,
    first: int,
    last: int,
    decoder: int,
    tail: int,
    free_s: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
) -> list[int]:
    """Spread the steps over the ranks from `first` to `last`, of which the last does at least `tail`."""
    step_s, num_steps = block.costs.step_s, block.num_steps
    steps = [0] * (last + 1)
    steps[last] = tail
    given, wanted = tail, float(tail)
    if given < num_steps:
        busy_s = [*free_s]
        busy_s[decoder] += block.costs.decode_s * block.costs.slowness(decoder)
        busy_s[last] += tail * step_s[last]
        filled_s = fill(
            busy_s, step_s, until_s, stair_s, range(first, last + 1), num_steps - given,
            least=block.least, most=block.most,
        )  # fmt: skip
        for rank in range(first, last + 1):
            wanted += max(0.0, filled_s[rank - first] - busy_s[rank]) / step_s[rank]
            upto = num_steps
            if rank < last:
                upto = min(max(int(wanted + 0.5), block.least[rank + 1] + tail), num_steps)
                upto = int(min(upto, block.most[rank] + tail))
            steps[rank] += upto - given
            given = upto
    if not steps[first]:
        _start_early(steps, first, last, free_s, until_s, step_s, block.most[first])
    return steps


def _start_early(
    steps: list[int],
    first: int,
    last: int,
    free_s: Sequence[float],
    until_s: Sequence[float],
    step_s: Sequence[float],
    most: float,
) -> None:
    """Do on the first rank, which is free, up to `most` steps of the time for which the sample would otherwise wait."""
    begins = next((rank for rank in range(first, last + 1) if steps[rank]), first)
    idle_s = min(free_s[begins], until_s[first]) - free_s[first]
    idle_steps = int(min(most, idle_s / step_s[first]))
    for rank in range(begins, last + 1):
        moved = max(0, min(idle_steps, steps[rank]))
        steps[rank] -= moved
        steps[first] += moved
        idle_steps -= moved
