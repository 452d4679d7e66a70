"""The size of a campaign, the expected ends of its jobs, and its counts."""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a campaign is."""

    num_jobs: int
    #: Ranks of a group.
    ranks: int
    #: Seconds that a pause or a full disk lasts; None: what the campaign takes by itself.
    hold_s: float | None = None
    #: Family of the untrained model, for campaigns with one.
    family: str = "svd"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected end of a job."""

    #: States in which it may end.
    states: Collection[str] = ("finished",)
    #: Words that the reason of its failure must contain.
    reason: str = ""


#: As most jobs must.
FINISHED = Expected()


@dataclass
class Tally:
    """The counts and findings of a running campaign."""

    num_faults: int = 0
    #: Seconds from a fault until its jobs were in work again.
    recoveries_s: list[float] = field(default_factory=list)
    #: Promises that were broken, as sentences.
    broken: list[str] = field(default_factory=list)
    #: What else is worth knowing, as sentences.
    notes: list[str] = field(default_factory=list)
    #: The most steps of one video that one fault may cost, where a number is promised.
    most_steps_again: int | None = None
