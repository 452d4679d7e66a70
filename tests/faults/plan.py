"""The size of a campaign, the expected ends of its jobs, and its counts."""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a campaign is."""

    num_jobs: int
    ranks: int  # ranks of a group
    hold_s: float | None = None  # seconds that a pause or a full disk lasts; None: what the campaign takes by itself
    family: str = "svd"  # family of the untrained model, for campaigns with one


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected end of a job."""

    states: Collection[str] = ("finished",)  # states in which it may end
    reason: str = ""  # words that the reason of its failure must contain


FINISHED = Expected()  # as most jobs must


@dataclass
class Tally:
    """The counts and findings of a running campaign."""

    num_faults: int = 0
    recoveries_s: list[float] = field(default_factory=list)  # seconds from a fault until its jobs were in work again
    broken: list[str] = field(default_factory=list)  # promises that were broken, as sentences
    notes: list[str] = field(default_factory=list)  # what else is worth knowing, as sentences
    #: The most steps of one video that one fault may cost, where a number is promised.
    most_steps_again: int | None = None
