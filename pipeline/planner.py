"""The plan of a stage that is given no other: fair shares of the steps, and decodes on the last rank that may."""

from collections.abc import Sequence

from svdq.pipeline.partition import Costs, Partitioner
from svdq.pipeline.protocols import Assignment


class FairShares:
    """Gives every rank the same time per sample; takes the next sample when rank 0 is free."""

    def __init__(self, num_ranks: int) -> None:
        self._partitioner = Partitioner(num_ranks)

    def assign(self, index: int, first_step: int, num_steps: int, costs: Costs, decoders: Sequence[int]) -> Assignment:
        """Spread the remaining steps over all ranks, of a whole video or the rest of one."""
        decoder = decoders[-1]
        boundaries = self._partitioner.split(first_step, num_steps, costs)
        # What ranks after the decoder would do falls to the decoder.
        after = len(boundaries) - 1 - decoder
        boundaries = boundaries[: decoder + 1] + (num_steps,) * after
        return Assignment(boundaries=boundaries, decoder=decoder)

    def wants_more(self) -> bool:
        """Begin nothing between two steps of rank 0."""
        return False

    def on_work(self, rank: int, index: int, kind: str, seconds: float) -> None:
        """Do nothing."""

    def on_ended(self, index: int) -> None:
        """Do nothing."""
