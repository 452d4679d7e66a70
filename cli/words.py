"""How jobs read on a terminal: one line each, always with the notice. Knows nothing but what it is given."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.producer.status import JobView


def with_notice(text: str, view: "JobView") -> str:
    """Say honestly what made the video, where it was no trained model."""
    return f"{text}, {view.notice}" if view.notice else text


def describe(view: "JobView") -> str:
    """Say how a job stands in one line, with its files or why it failed."""
    state = view.status
    if state == "started":
        state = f"started, step {view.step} of {view.steps}"
    details = "  ".join(view.outputs) if view.outputs else view.error or ""
    return f"{view.id}  {view.name}  {with_notice(state, view)}{': ' if details else ''}{details}"


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Align rows of cells into columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
