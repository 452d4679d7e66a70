"""The results of campaigns, as a table and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.plan import Tally

HEADINGS = ("campaign", "jobs", "faults", "lost", "duplicated", "wrong bits", "leftovers", "longest recovery")


def _row(tally: Tally) -> tuple[str, ...]:
    counts = (len(found) for found in (tally.lost, tally.duplicated, tally.wrong, tally.leftovers))
    recovery = f"{max(tally.recoveries_s):.1f} s" if tally.recoveries_s else "-"
    return (tally.campaign, *map(str, (tally.num_jobs, tally.num_faults, *counts)), recovery)


def as_table(tallies: Sequence[Tally]) -> str:
    """Lay out the results of campaigns as a table."""
    rows = [HEADINGS, *map(_row, tallies)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in ([*enumerate(zip(row, widths, strict=True))] for row in rows)
    )


def write_report(path: Path, settings: dict[str, Any], tallies: Sequence[Tally]) -> None:
    """Write the results with what was asked for."""
    document = settings | {"campaigns": [asdict(tally) for tally in tallies]}
    path.write_text(json.dumps(document, indent=2) + "\n")
