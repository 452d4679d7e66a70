"""The results of campaigns, as a table and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HEADINGS = ("campaign", "jobs", "faults", "lost", "duplicated", "wrong bits", "leftovers", "longest recovery")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one campaign."""

    campaign: str
    num_jobs: int = 0
    num_faults: int = 0  # faults that were injected
    #: What went wrong, a sentence each: jobs, files, leftovers, and promises of other kinds.
    lost: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    #: Seconds from each fault until the jobs that it hit were in work again; empty: it was not measured.
    recoveries_s: tuple[float, ...] = ()
    num_starts: int = 0  # times that a group of ranks has begun, the first ones included
    num_rendered_again: int = 0  # videos rendered more than once
    most_steps_again: int = 0  # the most steps of one video that were done again after one fault
    took_s: float = 0.0  # seconds that the campaign took, its check included
    #: Why it was left out; empty when it was not.
    skipped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.duplicated or self.wrong or self.leftovers or self.broken)

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        if self.skipped:
            return (self.campaign, "skipped", *[""] * (len(HEADINGS) - 2))
        counts = (len(found) for found in (self.lost, self.duplicated, self.wrong, self.leftovers))
        recovery = f"{max(self.recoveries_s):.1f} s" if self.recoveries_s else "-"
        return (self.campaign, *map(str, (self.num_jobs, self.num_faults, *counts)), recovery)

    def troubles(self) -> list[str]:
        """The broken promises, each with its kind."""
        kinds = ("lost", "duplicated", "wrong", "leftovers", "broken")
        return [f"{self.campaign}: {kind}: {sentence}" for kind in kinds for sentence in getattr(self, kind)]


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Lay out the outcomes as a table."""
    rows = [HEADINGS, *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in ([*enumerate(zip(row, widths, strict=True))] for row in rows)
    )


def write_report(path: Path, settings: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes with what they were asked for."""
    document = settings | {"campaigns": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(document, indent=2) + "\n")
