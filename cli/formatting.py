"""Formats jobs, times and tables, and prints lines that cannot control the terminal."""

import json
import unicodedata
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from svdq.producer.text import MAX_SECONDS, count, duration, printable

if TYPE_CHECKING:
    from svdq.producer.outbox import Outbox
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.job_view import JobView
    from svdq.producer.status.ranks import Condition, RankStatus
    from svdq.producer.status.registries import WorkerState


QUIET = "svdq.quiet"  # key of click's context: whether `echo` prints only to stderr


def echo(*lines: object, err: bool = False) -> None:
    """Print lines, escaped so that foreign text cannot start another line or control the terminal."""
    context = click.get_current_context(silent=True)
    if not err and context is not None and context.meta.get(QUIET):
        return
    for line in lines:
        click.echo(printable(str(line)), err=err)  # noqa: TID251 - escaped here


def echo_json(value: object) -> None:
    """Print a value as a line of JSON in ASCII, which cannot control the terminal."""
    click.echo(json.dumps(value))  # noqa: TID251 - escaped here


def named(name: str, link: str) -> str:
    """Name a job, and which link of a chain it is."""
    return f"{name} (link {link})" if link else name


MAX_NAME = 40  # columns of a terminal that a name takes in a table
PROMPT_LENGTH = 60  # characters of a prompt where it is not shown whole


def describe(
    view: "JobView", estimate: "Estimate | None" = None, *, whole_prompt: bool = False, with_owner: bool = False
) -> str:
    """Describe a job in one line: prompt, status, files or error and, where known, when it will be done."""
    state = view.status
    if state == "started" and (estimate is None or estimate.condition is None):
        state = f"started, {view.progress}" if view.steps else "started"  # its model chooses them
    elif view.scheduled_at is not None:
        is_due = view.scheduled_at <= datetime.now(UTC)  # which a worker notices
        state = f"{'waiting since' if is_due else 'scheduled for'} {clock(view.scheduled_at.timestamp())}"
    elif view.after:
        state = f"deferred until {', '.join(view.after)} has ended"
    elif view.waits_for and estimate is None:
        state += f", waits for {view.waits_for}"
    if estimate is not None:
        state += expected(estimate)
    if view.notice:  # no trained model made the video
        state += f", {view.notice}"
    details = "  ".join(view.outputs) if view.outputs else view.error or ""
    prompt = " ".join(view.prompt.split())
    if len(prompt) > PROMPT_LENGTH and not whole_prompt:
        prompt = f"{prompt[: PROMPT_LENGTH - 1]}…"
    name = named(view.name, view.link)
    if prompt:
        name = f'{name}  "{prompt}"'
    more = f"  (photo: {view.source})" if whole_prompt and view.source else ""
    if whole_prompt and (loras := view.parameters.get("loras")):
        from svdq.producer.job import shown_loras

        more += f"  (LoRA: {shown_loras(loras)})"
    more += f"  (owner: {view.owner})" if with_owner and view.owner else ""
    return f"{view.id}  {name}  {state}{': ' if details else ''}{details}{more}"


def expected(estimate: "Estimate") -> str:
    """Describe when a job will be done, or why that is unknown, as a continuation of its status."""
    if estimate.condition is not None:
        return f", waiting for storage: {condition_reason(estimate.condition)}"
    text = ""
    if estimate.waits_for:
        text = f", waits for {estimate.waits_for}"
    if estimate.num_ahead is not None:
        text += ", next" if estimate.num_ahead == 0 else f", {estimate.num_ahead:,} ahead of it"
    if estimate.eta_s is not None:
        text += f", done in about {duration(estimate.eta_s)}{estimate.by}"
    elif estimate.reason:
        text += f" ({estimate.reason[0].lower()}{estimate.reason[1:].rstrip('.')})"
    return text


def condition_sentence(rank: "RankStatus", condition: "Condition") -> str:
    """Describe what a rank waits for, and why."""
    return f"On {rank.host}, rank {rank.rank}: {condition.effect}: {condition_reason(condition)}"


def condition_reason(condition: "Condition") -> str:
    """Describe why something waits, since when, and how often it was tried."""
    times = "once" if condition.attempts == 1 else f"{condition.attempts:,} times"
    return f"{condition.reason} (since {clock(condition.since)}, tried {times})"


def webhook_sentences(outbox: "Outbox") -> list[str]:
    """Say how many webhooks are not accepted, since when, and why; nothing if none is refused."""
    if not outbox.refusal or outbox.oldest_at is None:
        return []
    waiting = f"{count(outbox.num_waiting, 'webhook')} not accepted, the oldest since {clock(outbox.oldest_at)}"
    return [f"{waiting}: the last attempt {outbox.refusal}."]


def sentence_of_workers(state: "WorkerState") -> str:
    """Say that no worker is running, that one is starting, or that Redis cannot be told of any."""
    if state == "unknown":
        from svdq.producer.status.estimates import UNKNOWN_WORKERS

        return UNKNOWN_WORKERS
    return "A worker is starting." if state == "starting" else "No worker is running; start one with `svdq worker`."


def clock(at: float, now: datetime | None = None) -> str:
    """Format seconds since the epoch as local time of day, with the date if it is not today."""
    moment = datetime.fromtimestamp(min(max(at, 0.0), MAX_SECONDS)).astimezone()
    today = (now or datetime.now().astimezone()).date()
    return f"{moment:%H:%M}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"


def outage_of(at: float) -> str:
    """Say since when Redis has not answered a command that goes on trying; `at` is in seconds since the epoch."""
    return f"Redis has not answered since {clock(at)}; retrying."


def words(value: object) -> str:
    """Format a value of JSON for a table."""
    if value is None or value == []:
        return "none"
    if isinstance(value, dict):
        return " ".join(f"{name} {words(each)}" for name, each in value.items())
    return ", ".join(map(words, value)) if isinstance(value, list) else str(value)


def table(
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[int] = (),
    flexible: int | None = None,
    width: int | None = None,
) -> list[str]:
    """Align rows of cells into columns, those of `right` to the right.

    The cells of the flexible column are cut at MAX_NAME, and to fit into a `width`; then the lines are.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
    if flexible is not None:
        header = cell_width(cells[0][flexible])
        over = 0 if width is None else max(0, sum(widths) + 2 * (len(widths) - 1) - width)
        widths[flexible] = max(header, min(widths[flexible] - over, MAX_NAME))
        for row in cells:
            row[flexible] = cut(row[flexible], widths[flexible])

    def padded(column: int, cell: str) -> str:
        blank = " " * (widths[column] - cell_width(cell))
        return blank + cell if column in right else cell + blank

    lines = ["  ".join(padded(column, cell) for column, cell in enumerate(row)).rstrip() for row in cells]
    return lines if width is None else [cut(line, width) for line in lines]


def cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: letters of East Asia take two, accents of their own none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "FW") for each in text)


def cut(text: str, width: int) -> str:
    """Cut a text that takes more columns of a terminal, with an ellipsis at its end."""
    if cell_width(text) <= width:
        return text
    while text and cell_width(text) >= width:
        text = text[:-1]
    return f"{text}…"
