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
    """The counts and findings of a campaign; sentences, but for numbers."""

    campaign: str = ""
    num_jobs: int = 0
    num_faults: int = 0
    #: What went wrong: jobs, files, leftovers, and promises of other kinds.
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)  # seconds from a fault until its jobs were in work again
    num_starts: int = 0  # times that a group of ranks has begun, the first ones included
    num_rendered_again: int = 0  # videos rendered more than once: allowed when the first was not acknowledged
    most_steps_again: int = 0  # the most steps of one video that were done again after one fault
    may_do_again: int | None = None  # the most that one fault may cost, where a number is promised
    took_s: float = 0.0  # seconds that the campaign took, its check included
    notes: list[str] = field(default_factory=list)  # what else is worth knowing

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not self.troubles()

    def troubles(self) -> list[str]:
        """The broken promises, each with its kind."""
        kinds = ("lost", "duplicated", "wrong", "leftovers", "broken")
        return [f"{self.campaign}: {kind}: {sentence}" for kind in kinds for sentence in getattr(self, kind)]
