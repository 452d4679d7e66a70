"""Fair shares of the denoising steps: assigns the steps of each sample to ranks. Pure code, without torch.

Every rank should be busy for the same time per sample. With K ranks, T steps of t seconds, an encode of E seconds on
rank 0 and a decode of D seconds on the last rank, that time is (T*t + E + D) / K, and a rank's ideal number of steps is
a fraction: 25 steps on 7 ranks are 3.57 each. Samples take turns at rounding it up and down (error diffusion), so that
over a run every rank does its share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Shares this close to a whole number count as whole, so that float noise does not move a step.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of one sample in seconds (or any other unit)."""

    #: A denoising step on each rank; K values above 0.
    step_s: tuple[float, ...]
    #: Encoding the photo, on rank 0.
    encode_s: float = 0.0
    #: Decoding the frames, on a rank of typical speed.
    decode_s: float = 0.0
    #: Decoding them on each rank, if the ranks differ; K values or none.
    decode_each_s: tuple[float, ...] = ()

    def decode_on(self, rank: int) -> float:
        """Return the cost of decoding on a rank."""
        return self.decode_each_s[rank] if self.decode_each_s else self.decode_s

    @property
    def fixed_s(self) -> list[float]:
        """Costs per sample of each rank besides its steps."""
        fixed_s = [0.0] * len(self.step_s)
        fixed_s[0] += self.encode_s
        fixed_s[-1] += self.decode_s
        return fixed_s


def fair_shares(num_steps: int, costs: Costs) -> list[float]:
    """Return the ideal, fractional number of steps of each rank: the shares that minimize the slowest rank's time.

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
    """Return the time between finished samples if every rank does exactly its share."""
    shares = fair_shares(num_steps, costs)
    return max(
        fixed_s + share * step_s for fixed_s, share, step_s in zip(costs.fixed_s, shares, costs.step_s, strict=True)
    )


class Partitioner:
    """Assigns whole steps so that successive samples together give every rank its fair share."""

    def __init__(self, num_ranks: int) -> None:
        #: Steps that each rank is behind its share (negative: ahead of it). In steps, not seconds, since the estimate
        #: of a step's seconds changes while it settles.
        self._owed = [0.0] * num_ranks

    def split(self, first_step: int, num_steps: int, costs: Costs) -> tuple[int, ...]:
        """Split the steps first_step..num_steps of the next sample.

        Args:
            first_step: 0, or the step from which a video resumes.
            num_steps: T.
            costs: costs of the sample.

        Returns:
            K+1 step indices from first_step to num_steps; rank r does boundaries[r] up to boundaries[r+1].
        """
        shares = fair_shares(num_steps - first_step, costs)
        steps = [math.floor(share + _EPSILON) for share in shares]
        fractions = [max(0.0, share - whole) for share, whole in zip(shares, steps, strict=True)]
        left_over = num_steps - first_step - sum(steps)
        for rank, fraction in enumerate(fractions):
            self._owed[rank] += fraction
        # The remaining steps go to the ranks that would be owed a whole step soonest, at most one each, and none to a
        # rank without a share. Earliest deadline first, after R. Tijdeman, "The chairman assignment problem" (1980):
        # ordering by the amount owed lets a rank with a small share fall behind by more than a step.
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
    """Convert the number of steps of each rank to K+1 step indices."""
    boundaries = [first_step]
    for count in steps:
        boundaries.append(boundaries[-1] + count)
    return tuple(boundaries)
