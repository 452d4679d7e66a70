"""Draws the parts of the live view: queues, ranks, and samples on their way through the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from svdq.cli.top.track import position_of
from svdq.producer.text import printable
from svdq.producer.timeparse import duration

if TYPE_CHECKING:
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.ranks import GroupStatus, RankStatus
    from svdq.producer.status.status import JobView, QueueView

Cell = str | Text

#: Colors of ranks, in rotation; a rank has the same color in both tables.
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
#: Smallest and largest width of a rank's part of a track; narrower tracks are left out.
_MIN_SEGMENT, _MAX_SEGMENT = 2, 8
#: Smallest and largest width of a name.
_MIN_NAME, _MAX_NAME = 6, 40
#: Width of the space between columns of a table.
_GAP = 2
#: From this width on, devices, memory and all states of a queue are shown.
_DEVICE_WIDTH, _MEMORY_WIDTH, _STATES_WIDTH = 90, 56, 88
_STATES = ("queued", "started", "scheduled", "deferred", "finished", "failed", "stopped", "canceled")
_MAIN_STATES = ("queued", "started", "finished", "failed")


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How much is drawn."""

    #: Leave out blank lines and empty queues.
    is_tight: bool = False
    #: Largest number of samples in flight per group; None for all.
    max_in_flight: int | None = None
    #: Whether ranks have rows.
    has_ranks: bool = True


def queue_table(queues: "Sequence[QueueView]", detail: Detail, width: int) -> Table:
    """Draw the number of jobs by queue and state."""
    states = _STATES if width >= _STATES_WIDTH else _MAIN_STATES
    used = [queue for queue in queues if any(queue.counts[state] for state in states)] or queues[:1]
    rows: list[list[Cell]] = []
    for queue in used if detail.is_tight else queues:
        counts = [queue.counts[state] for state in states]
        rows.append([queue.name, *(Text(str(count), style="" if count else "dim") for count in counts)])
    return _table(["queue", *states], rows, width, right=states)


def group_title(group: "GroupStatus", jobs: "Sequence[JobView]") -> Text:
    """Describe a group: its host, its model, its pace and its results."""
    first = group.ranks[0]
    title = Text(overflow="ellipsis", no_wrap=True)
    title.append(printable(f"{first.host}:{first.pid}"), style="bold")
    title.append(f"  {first.num_ranks} {'rank' if first.num_ranks == 1 else 'ranks'}  {len(jobs)} in flight")
    if intake := group.intake:
        if intake.pace_s:
            title.append(f"  one every {duration(intake.pace_s) if intake.pace_s >= 10 else f'{intake.pace_s:.1f} s'}")
        title.append(f"  {intake.finished} finished")
        if intake.failed:
            title.append(f", {intake.failed} failed", style="red")
        if intake.draining:
            title.append("  takes no more jobs", style="yellow")
    return title.append(printable(f"  {first.notice or first.model}"), style="dim")


def rank_table(group: "GroupStatus", names: Mapping[str, str], options: ConsoleOptions) -> Table:
    """Draw a row for each rank of a group, including ranks without a recent report."""
    width = options.max_width
    spoken = {rank.rank: rank for rank in group.ranks}
    rows: list[dict[str, Cell]] = []
    for number in range(group.ranks[0].num_ranks):
        row: dict[str, Cell] = {"rank": Text(str(number), style=_colour(number))}
        rank = spoken.get(number)
        if rank is None:
            row["job"] = Text("no recent report", style="dim")
        else:
            row["device"] = rank.device
            row["steps"] = _steps_of(rank)
            row["job"] = _doing(rank, names)
            row["step"] = "" if rank.job_id is None else f"{rank.step}/{rank.steps}"
            row["busy"] = _busy(rank, options)
            row["memory"] = _memory(rank)
        rows.append(row)
    headers = ["rank", "device", "steps", "job", "step", "busy", "memory"]
    if width < _DEVICE_WIDTH:
        headers.remove("device")
    if width < _MEMORY_WIDTH:
        headers.remove("memory")
    cells = [[row.get(header, "") for header in headers] for row in rows]
    return _table(headers, cells, width, right=("rank", "steps", "step", "memory"), wide="job")


def flight_table(
    group: "GroupStatus",
    jobs: "Sequence[JobView]",
    estimates: "Mapping[str, Estimate]",
    detail: Detail,
    options: ConsoleOptions,
) -> list[RenderableType]:
    """Draw the progress of each sample in flight through the ranks."""
    shown = jobs if detail.max_in_flight is None else jobs[: detail.max_in_flight]
    if not shown:
        return []
    width = options.max_width
    num_ranks = group.ranks[0].num_ranks
    positions = [position_of(job, group) for job in shown]
    eta_s = [estimates[job.id].eta_s if job.id in estimates else None for job in shown]
    rows: list[list[Cell]] = [
        [job.name, position.doing, Text("" if eta is None else f"about {duration(eta)}", style="dim")]
        for job, position, eta in zip(shown, positions, eta_s, strict=True)
    ]
    headers: list[Cell] = ["in flight", "", ""]
    # Tracks get the width that names and states leave; names shrink to a quarter of it.
    name, *words = (max(map(_length, column)) for column in zip(*rows, strict=True))
    room = width - min(name, _MAX_NAME, width // 4) - sum(words) - len(headers) * _GAP
    segment = min(_MAX_SEGMENT, room // num_ranks - 1)
    if segment >= _MIN_SEGMENT:
        headers.insert(1, Text.assemble(*((f"{rank:<{segment + 1}}", _colour(rank)) for rank in range(num_ranks))))
        for row, position in zip(rows, positions, strict=True):
            row.insert(1, _track(position.ranks_done, num_ranks, segment, options))
    table = _table(headers, rows, width, wide="in flight")
    left_out = len(jobs) - len(shown)
    return [table, Text(f"and {left_out} more", style="dim")] if left_out else [table]


def _track(ranks_done: float, num_ranks: int, segment: int, options: ConsoleOptions) -> Text:
    """Draw `segment` cells for each rank, colored up to the position of the sample."""
    done, todo = ("=", "-") if options.ascii_only else ("━", "─")
    stretches = []
    for number in range(num_ranks):
        cells = min(segment, max(0, round((ranks_done - number) * segment)))
        stretches.append(Text.assemble((done * cells, _colour(number)), (todo * (segment - cells), "dim")))
    return Text(" ").join(stretches)


def _doing(rank: "RankStatus", names: Mapping[str, str]) -> Text:
    if rank.job_id is None:
        return Text("waits for storage", style="yellow") if rank.activity == "waiting" else Text("idle", style="dim")
    return Text(printable(names.get(rank.job_id, rank.job_id)))


def _steps_of(rank: "RankStatus") -> str:
    """Format the range of steps of a rank: the first and the last."""
    if rank.step_range is None:
        return ""
    first, end = rank.step_range
    if first == end:
        return "none"
    return f"{first}-{end - 1}" if end - first > 1 else str(first)


def _busy(rank: "RankStatus", options: ConsoleOptions) -> Text:
    share = Text(f"{rank.busy_share:4.0%}")
    if options.max_width < _DEVICE_WIDTH:
        return share
    full, empty = ("=", "-") if options.ascii_only else ("━", "─")
    cells = round(rank.busy_share * 10)
    return Text.assemble((full * cells, _colour(rank.rank)), (empty * (10 - cells), "dim"), " ", share)


def _memory(rank: "RankStatus") -> str:
    """Format the memory of a rank: of its GPU if it has one, else of its process."""
    if rank.gpu_bytes is not None and rank.gpu_total_bytes:
        return f"{rank.gpu_bytes / 2**30:.1f} of {rank.gpu_total_bytes / 2**30:.0f} GiB"
    return f"{rank.rss_bytes / 2**20:.0f} MiB"


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _table(
    headers: Sequence[Cell], rows: Sequence[Sequence[Cell]], width: int, *, right: Sequence[str] = (), wide: str = ""
) -> Table:
    """Build a table without lines; on a narrow terminal the wide column shrinks first."""
    natural = [max(map(_length, column)) for column in zip(headers, *rows, strict=True)]
    excess = max(0, sum(natural) + _GAP * (len(natural) - 1) - width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for header, length in zip(headers, natural, strict=True):
        table.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max(_MIN_NAME, min(_MAX_NAME, length - excess)) if wide and header == wide else None,
        )
    for row in rows:
        # As Text, so that brackets in a name are not read as markup.
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _length(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len
