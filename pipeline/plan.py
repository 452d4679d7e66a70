"""Plans who does which steps of each sample, and who decodes it. Pure code: no torch, and times are arguments.

The planner keeps what each rank has been given and has not finished, and forecasts from that when each rank is free. A
sample is admitted when a rank can start it, and is then laid out over that rank and the ranks behind it.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from svdq.pipeline.costs import Costs
from svdq.pipeline.layout import Remainder, lay_out

#: Seconds for which the reports of other ranks may be on their way: so long, work counts as finished when expected.
REPORT_LAG_S = 0.15
#: How much further ahead each rank is than the one before, in fair shares: one is the rank's part of a sample, the rest
#: covers decodes that exceed a share, whole steps and disturbances.
STAIR_SHARES = 1.8


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


@dataclass(slots=True)
class _Work:
    """What a rank still has to do of a sample."""

    rank: int
    num_steps: int
    encodes: bool
    decodes: bool
    #: When it should be finished, as of the last forecast.
    expected_s: float = math.inf


@dataclass(slots=True)
class _InFlight:
    shape: Hashable
    share_s: float
    #: When it is ready for its next rank, at the latest known.
    ready_s: float
    #: Whether rank 0 has yet to encode it between steps of other samples.
    to_encode: bool
    works: list[_Work]


class Planner:
    """Assigns samples to ranks as they are admitted."""

    def __init__(self, num_ranks: int) -> None:
        """Begin with idle ranks; `num_ranks` is K."""
        self._num_ranks = num_ranks
        #: Ranks up to the last that can decode the latest sample.
        self._num_used = num_ranks
        #: In the order of their admission.
        self._in_flight: dict[int, _InFlight] = {}
        #: The latest costs of each shape of video, and of any.
        self._costs: dict[Hashable, Costs] = {}
        self._latest_costs: Costs | None = None
        #: When each rank last finished something.
        self._finished_s = [0.0] * num_ranks
        #: When a sample should be admitted for another rank, as last forecast, and when to forecast that again.
        self._wanted_s = self._look_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step on rank 0, as far as known."""
        return self._latest_costs.step_s[0] if self._latest_costs is not None else 0.0

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
        if self._num_used == 1:
            return math.inf
        if now >= self._look_s or decodes:
            free_s, encoded_s = self._forecast(now)
            next_s = costs.decode_on(0) if decodes else costs.step_s[0]
            self._wanted_s = min(free_s[1 : self._num_used]) - (encoded_s - now) - costs.encode_s - next_s
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
    ) -> Assignment:
        """Assign the next sample.

        Args:
            index: names the sample in reports; ranks work on the lowest index first.
            first_step: 0, or the step from which it resumes.
            num_steps: T.
            costs: estimated costs of its shape.
            decoders: the ranks that can decode it, ascending; at least one.
            shape: whatever identifies samples of the same costs.
            encoded: whether its photo is encoded already.
            num_waiting: jobs that wait after this one.
            now: the present time in seconds.
        """
        self._costs[shape] = self._latest_costs = costs
        sample = Remainder(num_steps=num_steps - first_step, costs=costs, decoders=decoders)
        self._num_used = len(sample.ranks)
        self._look_s = now
        step_s = costs.step_s
        free_s, encoded_s = self._forecast(now)
        if not encoded:
            encoded_s += costs.encode_s
            free_s[0] += costs.encode_s
        # The rank that is free first; of those within half a step, or free when the photo is encoded, the last.
        soon_s = max(min(free_s[rank] for rank in sample.ranks) + step_s[0] / 2, encoded_s)
        first = max(rank for rank in sample.ranks if free_s[rank] <= soon_s)
        if first:
            free_s[first] = max(free_s[first], encoded_s)
        share_s = fair_share_s(sample, 0.0 if encoded else costs.encode_s)
        # The largest video in flight needs the highest stairs. With few steps, a step exceeds the rest of a stair.
        large_s = max([share_s, *(other.share_s for other in self._in_flight.values())])
        stair_s = max(STAIR_SHARES * large_s, large_s + max(step_s))
        steps, decoder = lay_out(
            sample, first=first, free_s=free_s, num_waiting=num_waiting, share_s=share_s, stair_s=stair_s
        )
        boundaries = tuple(accumulate(steps, initial=first_step))
        boundaries += (num_steps,) * (self._num_ranks + 1 - len(boundaries))
        assignment = Assignment(boundaries=boundaries, decoder=decoder)
        own_encode = not encoded and assignment.first_rank == 0
        works = [
            _Work(rank, steps[rank], own_encode and rank == 0, rank == decoder)
            for rank in sample.ranks
            if steps[rank] or rank == decoder
        ]
        self._in_flight[index] = _InFlight(shape, share_s, now, not encoded and not own_encode, works)
        return assignment

    def finished(self, index: int, rank: int, what: str, now: float) -> None:
        """Learn that a rank has finished the `encode`, the `steps` or the `decode` of a sample.

        Of a sample that is not known, nothing is learned.
        """
        sample = self._in_flight.get(index)
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
        """Forget a sample, which is decoded, has failed or was canceled."""
        self._in_flight.pop(index, None)
        self._look_s = 0.0

    def _forecast(self, now: float) -> tuple[list[float], float]:
        """Return when each rank has done what it was given, and when rank 0 has encoded what starts on other ranks."""
        free_s = [*self._finished_s]
        # What is not finished when expected takes longer, or its report is on its way.
        earliest_s = [now, *[now - REPORT_LAG_S] * (self._num_ranks - 1)]
        encoded_s = now
        encodes_s = 0.0
        for sample in self._in_flight.values():
            costs = self._costs[sample.shape]
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
                    at_s += costs.decode_on(rank)
                if at_s < earliest_s[rank]:
                    at_s = earliest_s[rank]
                free_s[rank] = work.expected_s = at_s
        free_s = [max(rank_s, now) for rank_s in free_s]
        free_s[0] += encodes_s
        return free_s, encoded_s


def fair_share_s(sample: Remainder, encode_s: float) -> float:
    """Return the seconds that each rank is busy with a sample when all are equally busy with it."""
    step_s = sample.costs.step_s
    return (sample.num_steps_worth + encode_s / step_s[0]) / sum(1 / step_s[rank] for rank in sample.ranks)
