"""Formats jobs, times and tables for a terminal, and prints lines that cannot control it."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from svdq.producer.moments import duration
from svdq.producer.text import printable

if TYPE_CHECKING:
    from svdq.producer.status.outlook import Outlook
    from svdq.producer.status.ranks import Trouble
    from svdq.producer.status.status import JobView


def echo(line: object = "", *, err: bool = False) -> None:
    """Print one line; whatever foreign text it contains cannot start another line or control the terminal."""
    click.echo(printable(str(line)), err=err)  # noqa: TID251 - escaped here


def with_notice(text: str, view: "JobView") -> str:
    """Say honestly what made the video, where it was no trained model."""
    return f"{text}, {view.notice}" if view.notice else text


def describe(view: "JobView", outlook: "Outlook | None" = None) -> str:
    """Say how a job stands in one line, with its files or why it failed, and what is to be expected of it if known."""
    state = view.status
    if state == "started" and (outlook is None or outlook.trouble is None):
        state = f"started, step {view.step} of {view.steps}"
    elif view.scheduled_at is not None:
        state = f"scheduled for {clock(view.scheduled_at.timestamp())}"
    elif view.after:
        state = f"deferred until {', '.join(view.after)} has ended"
    if outlook is not None:
        state += expected(outlook)
    details = "  ".join(view.outputs) if view.outputs else view.error or ""
    return f"{view.id}  {view.name}  {with_notice(state, view)}{': ' if details else ''}{details}"


def expected(outlook: "Outlook") -> str:
    """Say what is to be expected of a job, to follow how it stands."""
    text = ""
    if outlook.trouble is not None:
        return f", waiting for storage: {trouble_reason(outlook.trouble)}"
    if outlook.num_ahead is not None:
        text = ", next" if outlook.num_ahead == 0 else f", {outlook.num_ahead} ahead of it"
    if outlook.eta_s is not None:
        text += f", done in about {duration(outlook.eta_s)}"
    return text


def trouble_reason(trouble: "Trouble") -> str:
    """Say why something has to wait, since when, and how often it was tried."""
    times = "once" if trouble.attempts == 1 else f"{trouble.attempts} times"
    return f"{trouble.reason} (since {clock(trouble.since)}, tried {times})"


def clock(at: float, now: datetime | None = None) -> str:
    """Write seconds since the epoch as the time of day here, with the date when it is another day's."""
    moment = datetime.fromtimestamp(at).astimezone()
    today = (now or datetime.now().astimezone()).date()
    return f"{moment:%H:%M}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Align rows of cells into columns."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
