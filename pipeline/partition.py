"""Fair shares of the denoising steps: which rank does which steps of a sample. Pure arithmetic, no torch, no clock.

Every rank should be busy for the same time a sample. With K ranks, T steps of t seconds, an encode of E seconds on rank
0 and a decode of D seconds on the last, that time is (T*t + E + D) / K, and a rank's ideal number of steps is a
fraction: 25 steps on 7 ranks are 3.57 each. Samples take turns at rounding it up and down (error diffusion), so that
over a run every rank carries its share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Shares within this of a whole number count as whole: float noise must not hand out a step.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one sample costs, in seconds (or any one unit)."""

    #: A denoising step on each rank; K values above 0.
    step_s: tuple[float, ...]
    #: Encoding the photo, on rank 0.
    encode_s: float = 0.0
    #: Decoding the frames, on the last rank.
    decode_s: float = 0.0

    @property
    def fixed_s(self) -> list[float]:
        """What each rank pays for a sample besides its steps."""
        fixed_s = [0.0] * len(self.step_s)
        fixed_s[0] += self.encode_s
        fixed_s[-1] += self.decode_s
        return fixed_s


def fair_shares(num_steps: int, costs: Costs) -> list[float]:
    """Give each rank its ideal, fractional number of steps: the shares that make the slowest rank's time smallest.

    Shares sum to `num_steps`. A rank whose fixed cost alone exceeds the common time gets none.
    """
    if num_steps == 0:
        return [0.0] * len(costs.step_s)
    all_fixed_s = costs.fixed_s
    # The common time tau solves sum((tau - fixed_r) / step_r over ranks with fixed_r < tau) = num_steps. The left side
    # grows with tau, so ranks join in the order of their fixed costs until the next one would be above tau.
    ranks = sorted(range(len(costs.step_s)), key=lambda rank: all_fixed_s[rank])
    rate = offset = tau = 0.0
    for position, rank in enumerate(ranks):
        rate += 1 / costs.step_s[rank]
        offset += all_fixed_s[rank] / costs.step_s[rank]
        tau = (num_steps + offset) / rate
        if position + 1 < len(ranks) and tau <= all_fixed_s[ranks[position + 1]]:
            break
    return [max(0.0, (tau - fixed_s) / step_s) for fixed_s, step_s in zip(all_fixed_s, costs.step_s, strict=True)]


def fair_time_s(num_steps: int, costs: Costs) -> float:
    """Give the time between finished samples when every rank carries exactly its share."""
    shares = fair_shares(num_steps, costs)
    return max(
        fixed_s + share * step_s for fixed_s, share, step_s in zip(costs.fixed_s, shares, costs.step_s, strict=True)
    )


class Partitioner:
    """Hands out whole steps so that successive samples together give every rank its fair share."""

    def __init__(self, num_ranks: int) -> None:
        #: Steps that each rank has been spared so far (negative: done ahead of its share). In steps and not in seconds,
        #: since the estimate of a step's seconds changes while it settles.
        self._owed = [0.0] * num_ranks

    def split(self, first_step: int, num_steps: int, costs: Costs) -> tuple[int, ...]:
        """Split the steps first_step..num_steps of the next sample.

        Args:
            first_step: 0, or the step at which a video is resumed.
            num_steps: T.
            costs: of the sample.

        Returns:
            K+1 step indices from first_step to num_steps; rank r does boundaries[r] up to boundaries[r+1].
        """
        shares = fair_shares(num_steps - first_step, costs)
        steps = [math.floor(share + _EPSILON) for share in shares]
        fractions = [max(0.0, share - whole) for share, whole in zip(shares, steps, strict=True)]
        left_over = num_steps - first_step - sum(steps)
        for rank, fraction in enumerate(fractions):
            self._owed[rank] += fraction
        # The steps left over go to the ranks that would soonest be owed a whole step, at most one each, and none to a
        # rank without a share. Earliest deadline first, after R. Tijdeman, "The chairman assignment problem" (1980):
        # going by who is owed most lets a rank with a small share fall behind by more than a step.
        takers = [rank for rank, fraction in enumerate(fractions) if fraction > _EPSILON]
        takers.sort(
            key=lambda rank: (
                self._owed[rank] <= _EPSILON,
                round((1 - self._owed[rank]) / fractions[rank], 6),
                rank,
            )
        )
        for rank in takers[:left_over]:
            steps[rank] += 1
            self._owed[rank] -= 1
        return boundaries_of(first_step, steps)


def boundaries_of(first_step: int, steps: Sequence[int]) -> tuple[int, ...]:
    """Turn the number of steps of each rank into K+1 step indices."""
    boundaries = [first_step]
    for count in steps:
        boundaries.append(boundaries[-1] + count)
    return tuple(boundaries)
