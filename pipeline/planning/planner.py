"""Plans who does which steps of each sample, and who decodes it. Pure code: no torch, and times are arguments.

A sample is admitted when a rank can start it, and is then laid out over that rank and the ranks behind it, by the
forecast of when each of them is free. Ranks may be bound to a range of a sample's steps.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from svdq.pipeline.planning.blocks import Block, divide, narrow
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.forecast import Forecast, InFlight, RankWork
from svdq.pipeline.planning.spread import spread

#: How much further ahead each rank is than the one before, in fair shares: one is the rank's part of a sample, the rest
#: covers decodes that exceed a share, whole steps and disturbances.
STAIR_SHARES = 1.8
#: How much later each of the last samples reaches the next block than the one before, in fair shares. A rank works on
#: what has arrived: if a later sample came first, the one before would wait for all of its work.
APART_SHARES = 0.3
#: Seconds of work to which very short steps are put together while many samples wait: to take over a sample and to hand
#: it on costs a rank about a millisecond, however short its steps are.
MIN_STAGE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Who does what of a sample."""

    #: K+1 step indices: rank r does the steps from boundaries[r] up to, not including, boundaries[r+1].
    boundaries: tuple[int, ...]
    #: The rank that decodes, not before the last rank with steps.
    decoder: int

    def __post_init__(self) -> None:
        # Samples go down the chain only.
        assert list(self.boundaries) == sorted(self.boundaries), self
        assert 0 <= self.decoder < len(self.boundaries) - 1, self
        assert self.boundaries[self.decoder + 1] == self.boundaries[-1], self

    @property
    def first_rank(self) -> int:
        """The rank that works on the sample first, apart from its encode."""
        pairs = zip(self.boundaries, self.boundaries[1:], strict=False)
        return next((rank for rank, (start, stop) in enumerate(pairs) if start < stop), self.decoder)


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """Ranks for which samples should be admitted neither too late nor too early."""

    ranks: range
    #: The least seconds from the admission of a sample until it reaches them.
    least_s: float
    #: How many seconds of work they should have in advance.
    ahead_s: float


class Planner:
    """Assigns samples to ranks as they are admitted."""

    def __init__(self, num_ranks: int) -> None:
        """Begin with idle ranks; `num_ranks` is K."""
        self._num_ranks = num_ranks
        self._forecast = Forecast(num_ranks)
        self._latest_costs: Costs | None = None
        #: Ranks up to the last that can start the latest sample.
        self._num_starters = num_ranks
        #: What must have room for a sample, besides rank 0, when it is admitted.
        self._reach: list[_Reach] = []
        #: When a sample should be admitted for another rank, as last forecast, and when to forecast that again.
        self._wanted_s = self._look_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step on rank 0, as far as known."""
        return self._latest_costs.step_s[0] if self._latest_costs is not None else 0.0

    def wait_for_room_s(self, now: float) -> float:
        """Return the seconds until a sample should be admitted, even if rank 0 is idle.

        Where other ranks are bound to the steps that cost most, samples would pile up before them, and a job of a high
        priority would wait behind all of these.
        """
        if not self._reach:
            return 0.0
        return max(0.0, self._room_s(self._forecast.free_s(now)[0]) - now)

    def wait_for_others_s(self, now: float, *, decodes: bool = False) -> float:
        """Return the seconds until a sample should be admitted for another rank than 0; must be cheap.

        Its photo must be encoded when that rank is free, and rank 0 encodes before or after its next piece of work.

        Args:
            now: the present time.
            decodes: whether the next piece is a decode; else it is a step.
        """
        costs = self._latest_costs
        if costs is None:
            return 0.0
        if self._num_starters == 1:
            return math.inf
        if now >= self._look_s or decodes:
            free_s, encoded_s = self._forecast.free_s(now)
            next_s = costs.decode_s * costs.slowness(0) if decodes else costs.step_s[0]
            self._wanted_s = min(free_s[1 : self._num_starters]) - (encoded_s - now) - costs.encode_s - next_s
            self._wanted_s = max(self._wanted_s, self._room_s(free_s))
            # Reports change the forecast, but half of the time passes in any case.
            self._look_s = now if decodes else now + (self._wanted_s - now) / 2
        return max(0.0, self._wanted_s - now)

    def admit(
        self,
        index: int,
        first_step: int,
        num_steps: int,
        costs: Costs,
        decoders: Sequence[int],
        *,
        shape: Hashable,
        encoded: bool,
        num_waiting: int,
        now: float,
        bounds: Sequence[tuple[int, int]] | None = None,
    ) -> Assignment:
        """Assign the next sample.

        Args:
            index: names the sample in reports; ranks work on the lowest index first.
            first_step: 0, or the step from which it resumes.
            num_steps: T.
            costs: estimated costs of its shape.
            decoders: the ranks that can decode it, ascending; the last one must be able to do the last step.
            shape: whatever identifies samples of the same costs.
            encoded: whether its photo is encoded already.
            num_waiting: jobs that wait after this one.
            now: the present time in seconds.
            bounds: the steps (first, stop) that each rank may do, nondecreasing down the chain, together all of 0 to T;
                None: every rank may do every step.
        """
        self._forecast.costs[shape] = self._latest_costs = costs
        self._look_s = now
        free_s, ready_s = self._forecast.free_s(now)
        encode_s = 0.0 if encoded else costs.encode_s
        ready_s += encode_s
        free_s[0] += encode_s
        begin, end, together = first_step, num_steps, 1
        if bounds is None and num_waiting >= self._num_ranks:
            together = _steps_together(num_steps - first_step, costs)
        if together > 1:  # they count as one step until ranks have been chosen
            first_step, num_steps = 0, math.ceil((end - begin) / together)
            costs = costs.scaled(step=together)
        bounds = bounds or [(0, num_steps)] * self._num_ranks
        if len(self._forecast.in_flight) + num_waiting < self._num_ranks:
            bounds = narrow(bounds[: decoders[-1] + 1], num_steps, costs.step_s)
        blocks = divide(bounds, first_step, num_steps, costs, decoders, encodes=not encoded)
        boundaries, decoder, share_s = [first_step], 0, [0.0] * self._num_ranks
        reach = []
        for block in blocks:
            # The rank that is free first; of those within half a step, or free when the sample is ready, the last.
            starters = [block.rank + rank for rank in block.starters]
            soon_s = max(min(free_s[rank] for rank in starters) + costs.step_s[block.rank] / 2, ready_s)
            first = max(rank for rank in starters if free_s[rank] <= soon_s)
            if first:
                free_s[first] = max(free_s[first], ready_s)
            share = block.share_s(0.0 if block.rank else encode_s)
            stair_s = self._stair_s(block, share)
            if block is not blocks[0]:
                least_s = encode_s + (block.step - first_step) * min(costs.step_s)
                ranks = range(block.rank, block.rank + len(block.ranks))
                reach.append(_Reach(ranks=ranks, least_s=least_s, ahead_s=stair_s))
            elif not (encoded and block.rank):
                self._num_starters = starters[-1] + 1
                if block.rank:
                    # Rank 0 only encodes: that it is idle does not mean that a sample can start.
                    ranks = range(block.rank, self._num_starters)
                    reach.append(_Reach(ranks=ranks, least_s=encode_s + max(costs.step_s), ahead_s=0.0))
            steps, decoder = spread(
                block,
                first=first - block.rank,
                free_s=free_s[block.rank : block.rank + len(block.costs.step_s)],
                num_waiting=num_waiting,
                share_s=share,
                stair_s=stair_s,
                apart_s=0.0 if block is blocks[-1] else APART_SHARES * share,
            )
            decoder += block.rank
            boundaries += [boundaries[-1]] * (block.rank + 1 - len(boundaries))
            ready_s = free_s[first]
            for rank, number in enumerate(steps, block.rank):
                share_s[rank] = share
                boundaries.append(boundaries[-1] + number)
                if number:
                    ready_s = max(ready_s, free_s[rank]) + number * costs.step_s[rank]
        boundaries += [num_steps] * (self._num_ranks + 1 - len(boundaries))
        if not encoded:
            self._reach = reach
        if together > 1:
            boundaries = [min(begin + together * step, end) for step in boundaries]
        assignment = Assignment(boundaries=tuple(boundaries), decoder=decoder)
        self._note(index, assignment, shape, share_s, encoded=encoded, now=now)
        return assignment

    def finished(self, index: int, rank: int, what: str, now: float) -> None:
        """Learn that a rank has finished the `encode`, the `steps` or the `decode` of a sample.

        Of a sample that is not known, nothing is learned.
        """
        self._forecast.finished(index, rank, what, now)
        if index not in self._forecast.in_flight:
            self._look_s = 0.0

    def ended(self, index: int) -> None:
        """Forget a sample, which is decoded, has failed or was canceled."""
        self._forecast.ended(index)
        self._look_s = 0.0

    def _room_s(self, free_s: Sequence[float]) -> float:
        """Return when a sample must be admitted to reach all ranks when they have little left to do, at the latest."""
        room_s = 0.0
        for reach in self._reach:
            wanted_s = min(free_s[rank] for rank in reach.ranks) - reach.ahead_s
            # Otherwise they have little left to do before what is on its way reaches them.
            if wanted_s > max(free_s[: reach.ranks.start]):
                room_s = max(room_s, wanted_s - reach.least_s)
        return room_s

    def _stair_s(self, block: Block, share_s: float) -> float:
        """Return how much further each rank of a block should be ahead than the one before, in seconds."""
        # The largest video in flight needs the highest stairs. With few steps, a step exceeds the rest of a stair.
        large_s = max([share_s, *(sample.share_s[block.rank] for sample in self._forecast.in_flight.values())])
        return max(STAIR_SHARES * large_s, large_s + max(block.costs.step_s))

    def _note(
        self, index: int, assignment: Assignment, shape: Hashable, share_s: list[float], *, encoded: bool, now: float
    ) -> None:
        """Add what was assigned to the forecast."""
        boundaries = assignment.boundaries
        own_encode = not encoded and assignment.first_rank == 0
        works = []
        for rank in range(self._num_ranks):
            num_steps, decodes = boundaries[rank + 1] - boundaries[rank], rank == assignment.decoder
            if num_steps or decodes:
                works.append(RankWork(rank, num_steps, own_encode and rank == 0, decodes))
        self._forecast.in_flight[index] = InFlight(shape, share_s, now, not encoded and not own_encode, works)


def _steps_together(num_steps: int, costs: Costs) -> int:
    """Return how many steps to leave to one rank at least, where a rank's share would be shorter than `MIN_STAGE_S`."""
    work_s = num_steps * costs.step_s[0]
    if (work_s + costs.decode_s) / len(costs.step_s) >= MIN_STAGE_S:
        return 1
    return math.ceil(num_steps / max(1, round(work_s / MIN_STAGE_S)))
