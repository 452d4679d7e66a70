"""Lays one sample out on the chain of ranks: how many steps each rank does, and which rank decodes. Pure code.

Ranks further down the chain stay further ahead: rank r has work for about r stairs more than rank 0. So a sample
reaches each rank while that rank is still busy with the sample before, and the work of a sample spreads evenly. Whole
steps follow from the times at which ranks are free, so that what rounding takes from a rank it gets back with the next
sample.

No rank works beyond the time at which all of them can end. Near that time the stairs are cut off from the top: the
last sample runs on rank 0 alone, the one before ends on rank 1, and so on, each rank being filled to the end. For few
samples this is the wrap-around rule of R. McNaughton, "Scheduling with deadlines and loss functions" (1959).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from svdq.pipeline.costs import Costs

#: How much more than the end of the common time weighs than the same time elsewhere, squared.
_OVERTIME_WEIGHT = 10.0


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """What is left to do of a sample, and where it may be done."""

    #: Denoising steps.
    num_steps: int
    costs: Costs
    #: Ranks that can decode, ascending; no rank behind the last of them can do anything.
    decoders: Sequence[int]

    @property
    def ranks(self) -> range:
        """The ranks that can do something."""
        return range(self.decoders[-1] + 1)

    @property
    def num_steps_worth(self) -> float:
        """The steps and the decode, in steps."""
        costs = self.costs
        decodes = [costs.decode_on(rank) / costs.step_s[rank] for rank in self.decoders]
        return self.num_steps + sum(decodes) / len(decodes)


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


def lay_out(
    sample: Remainder, *, first: int, free_s: Sequence[float], num_waiting: int, share_s: float, stair_s: float
) -> tuple[list[int], int]:
    """Lay out a sample.

    Args:
        sample: what is left of it.
        first: the rank on which it starts.
        free_s: when each rank is free, and for `first` the sample there.
        num_waiting: samples like it that wait after this one.
        share_s: the fair share of each rank in it.
        stair_s: how much further each rank should be ahead than the one before.

    Returns:
        The number of steps of each rank, and the rank that decodes.
    """
    costs, num_steps, ranks = sample.costs, sample.num_steps, sample.ranks
    if not num_steps:
        return [0] * len(ranks), min(rank for rank in sample.decoders if rank >= first)
    step_s, decode_s = costs.step_s, [costs.decode_on(rank) for rank in ranks]
    # With fewer samples left than ranks, this one is the last of a rank: it ends there and fills it.
    fills = num_waiting < len(ranks)
    last = max(num_waiting, first) if fills else ranks[-1]
    # Idle ranks before the first are free for the samples after this one, when their photos are encoded.
    backlog_s = [*free_s[: last + 1]]
    for rank in range(first):
        backlog_s[rank] = max(free_s[rank], free_s[first] + min(num_waiting, first - rank) * costs.encode_s)
    backlog_s[0] += max(0, num_waiting - first) * costs.encode_s
    end_s = max(
        common_end_s(backlog_s, step_s[: last + 1], (num_waiting + 1) * sample.num_steps_worth),
        free_s[first] + num_steps * step_s[first] + min(decode_s[rank] for rank in sample.decoders),
    )
    until_s = []
    steps_of_last = float(num_steps)
    for rank in ranks:
        # The last sample of each rank does one share on each rank before, and all the rest there.
        until_s.append(end_s - decode_s[rank] - max(0.0, steps_of_last) * step_s[rank])
        steps_of_last -= share_s / step_s[rank]
    if fills:
        decoder = min((rank for rank in sample.decoders if rank >= last), key=lambda rank: (rank != last, free_s[rank]))
        room_s = end_s - free_s[last] - decode_s[decoder]
        tail = max(0, min(num_steps, int(room_s / step_s[last] + 0.5))) if last > first else num_steps
        until_s[last] = end_s
        steps = _spread(sample, first, last, decoder, tail, free_s, until_s, stair_s)
        return steps, decoder
    best: tuple[float, list[int], int] | None = None
    ideal_s = _fill(free_s, step_s, [end_s] * len(ranks), stair_s, first, last, sample.num_steps_worth)
    decoders = sample.decoders
    if costs.decode_s < step_s[0]:
        # Whole steps balance as well, and frames have 24 times the bytes of latents in half precision.
        decoders = decoders[-1:]
    for decoder in decoders:
        if decoder < first:
            continue
        steps = _spread(sample, first, decoder, decoder, 0, free_s, until_s, stair_s)
        at_s, score = free_s[first], 0.0
        for rank in range(first, len(ranks)):
            after_s = free_s[rank]
            if steps[rank] or rank == decoder:
                at_s = max(at_s, after_s) + steps[rank] * step_s[rank]
                if rank == decoder:
                    at_s += decode_s[rank]
                after_s = at_s
            score += (after_s - ideal_s[rank - first]) ** 2 + _OVERTIME_WEIGHT * max(0.0, after_s - end_s) ** 2
        if best is None or score <= best[0]:
            best = score, steps, decoder
    assert best is not None
    return best[1], best[2]


def _spread(
    sample: Remainder,
    first: int,
    last: int,
    decoder: int,
    tail: int,
    free_s: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
) -> list[int]:
    """Spread the steps over the ranks from `first` to `last`, of which the last does at least `tail`."""
    step_s, num_steps = sample.costs.step_s, sample.num_steps
    steps = [0] * len(step_s)
    steps[last] = tail
    given, wanted = tail, float(tail)
    if given < num_steps:
        busy_s = [*free_s]
        busy_s[decoder] += sample.costs.decode_on(decoder)
        busy_s[last] += tail * step_s[last]
        filled_s = _fill(busy_s, step_s, until_s, stair_s, first, last, num_steps - given)
        for rank in range(first, last + 1):
            wanted += max(0.0, filled_s[rank - first] - busy_s[rank]) / step_s[rank]
            upto = num_steps if rank == last else min(num_steps, int(wanted + 0.5))
            steps[rank] += upto - given
            given = upto
    if not steps[first]:
        _start_early(steps, first, last, free_s, until_s, step_s)
    return steps


def _start_early(
    steps: list[int],
    first: int,
    last: int,
    free_s: Sequence[float],
    until_s: Sequence[float],
    step_s: Sequence[float],
) -> None:
    """Do on the first rank, which is free, steps of the time for which the sample would otherwise wait."""
    begins = next((rank for rank in range(first, last + 1) if steps[rank]), first)
    idle_s = min(free_s[begins], until_s[first]) - free_s[first]
    idle_steps = int(idle_s / step_s[first])
    for rank in range(begins, last + 1):
        moved = max(0, min(idle_steps, steps[rank]))
        steps[rank] -= moved
        steps[first] += moved
        idle_steps -= moved


def _fill(
    free_s: Sequence[float],
    step_s: Sequence[float],
    until_s: Sequence[float],
    stair_s: float,
    first: int,
    last: int,
    num_steps: float,
) -> list[float]:
    """Return up to when each rank from `first` to `last` is busy with `num_steps` more.

    Ranks are filled like stairs into which water runs, none beyond `until_s`; what is left then is spread evenly.
    """
    ranks = range(first, last + 1)
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
    common_s = common_end_s(full_s, step_s[first : last + 1], left)
    return [max(common_s, rank_s) for rank_s in full_s]
