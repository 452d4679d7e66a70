"""Draws a snapshot with rich: queues, ranks and videos in flight. `svdq status` prints it, `svdq top` repeats it."""

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderableType, group
from rich.table import Table
from rich.text import Text

from svdq.cli.formatting import clock, condition_sentence, describe, sentence_of_workers
from svdq.producer.keys import STATUSES
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import GroupStatus, RankStatus
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.text import count, duration, pace, printable

Cell = str | Text

PLAIN_WIDTH = 120  # width of the output when it does not go to a terminal
_COLORS = ("cyan", "green", "magenta", "blue", "yellow")  # of ranks, in rotation, in both tables
_MIN_SEGMENT, _MAX_SEGMENT = 2, 8  # width of a rank's part of a track; narrower tracks are left out
#: Width of the other columns beside a track, and largest width of a name.
_BESIDE_TRACK, _MAX_NAME = 50, 40


def lines_of(snapshot: Snapshot) -> list[str]:
    """Return a snapshot as lines of text, as wide as the terminal."""
    console = Console(width=shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns, color_system=None)
    with console.capture() as captured:
        console.print(draw(snapshot, console.options))
    return [line.rstrip() for line in captured.get().splitlines()]


@group()
def draw(
    snapshot: Snapshot, options: ConsoleOptions, *, outage: str = "", is_live: bool = False
) -> Iterator[RenderableType]:
    """Draw all parts of a snapshot, the most important ones first.

    `outage` says in a sentence why there is nothing newer; if `is_live`, it fills the screen and a key quits it.
    """
    blank = [] if is_live else [Text("")]
    rate = "" if snapshot.videos_per_hour is None else f"{pace(snapshot.videos_per_hour)}  "
    ended = f"{snapshot.finished_last_hour:,} finished and {snapshot.failed_last_hour:,} failed in the last hour"
    now = datetime.fromtimestamp(snapshot.at)
    yield Text.assemble(("svdq", "bold"), f" {now:%H:%M:%S}  ", (rate, "bold"), ended)
    yield Text.assemble(printable(_forecast(snapshot)), ("  q quits" if is_live else "", "dim"))
    warnings = [f"{outage} This is the last known state."] if outage else []
    conditions = (condition_sentence(*each) for each in snapshot.conditions)
    for sentence in (*warnings, *snapshot.pauses, *conditions, *snapshot.failed_gpus):
        yield Text(printable(sentence), style="bold yellow")
    yield from blank
    yield _queue_table(snapshot.queues)
    for each in snapshot.groups:
        jobs = snapshot.jobs_by_group.get(each.name, [])
        yield from blank
        yield _group_title(each, len(jobs))
        first = each.ranks[0]
        if first.loras or first.defaults:  # how a model file changes its base, on a separate line, which may wrap
            loras = f" with {', '.join(first.loras)}" if first.loras else ""
            yield Text(printable(f"model {first.model}{loras}"), style="dim")
        yield _rank_table(each, snapshot.names, options)
        if jobs:
            yield from blank
            yield _flight_table(each, jobs, snapshot, options)
    others = [sentence_of_workers(snapshot.worker_state)] if snapshot.worker_state != "running" else []
    reporting = {each.intake.worker for each in snapshot.groups if each.intake}
    others += [
        f"{worker.name}  {worker.state}  {worker.hostname}:{worker.pid}  no recent report"
        for worker in snapshot.workers
        if worker.name not in reporting
    ]
    others += [
        describe(job, snapshot.estimates.get(job.id), with_owner=snapshot.has_several_owners)
        for job in snapshot.jobs_by_group.get(None, [])
    ]
    yield from blank if others else ()
    for line in others:
        yield Text(printable(line))


def _forecast(snapshot: Snapshot) -> str:
    num_left = snapshot.waiting.num_jobs + len(snapshot.jobs)
    eta_s = snapshot.estimate.eta_s
    if num_left == 0:
        return "No job is waiting or in flight."
    if eta_s is None:
        return f"{num_left:,} to do; the end is unknown: {snapshot.estimate.reason}"
    return f"{num_left:,} to do, done in about {duration(eta_s)}, at {clock(snapshot.at + eta_s)}."


def _queue_table(queues: Mapping[str, Mapping[str, int]]) -> Table:
    shown = {status for counts in queues.values() for status in counts if counts[status]}
    shown |= {"queued", "started", "finished", "failed"}
    statuses = [status for status in STATUSES if status in shown]
    rows: list[list[Cell]] = [
        [name, *(Text(f"{counts[status]:,}", style="" if counts[status] else "dim") for status in statuses)]
        for name, counts in queues.items()
    ]
    return _table(["queue", *statuses], rows, right=statuses)


def _group_title(group: GroupStatus, num_jobs: int) -> Text:
    first = group.ranks[0]
    title = Text(overflow="ellipsis", no_wrap=True)
    title.append(printable(f"{first.host}:{first.pid}"), style="bold")
    title.append(f"  {count(first.num_ranks, 'rank')}  {num_jobs} in flight")
    if intake := group.intake:
        if intake.pace_s:
            title.append(f"  one every {duration(intake.pace_s) if intake.pace_s >= 10 else f'{intake.pace_s:.1f} s'}")
        title.append(f"  {intake.finished:,} finished")
        if intake.failed:
            title.append(f", {intake.failed:,} failed", style="red")
        if intake.draining:
            title.append("  takes no more jobs", style="yellow")
    return title.append(printable(f"  {first.notice or first.model}"), style="dim")


def _rank_table(group: GroupStatus, names: Mapping[str, str], options: ConsoleOptions) -> Table:
    ranks = {rank.rank: rank for rank in group.ranks}
    rows: list[list[Cell]] = []
    for number in range(group.ranks[0].num_ranks):
        head = Text(str(number), style=_color(number))
        rank = ranks.get(number)
        if rank is None:
            rows.append([head, "", "", Text("no recent report", style="dim"), "", "", ""])
            continue
        if rank.job_id is not None:
            job = Text(printable(names.get(rank.job_id, rank.job_id)))
        elif rank.activity == "loading":
            job = Text(rank.loading_text, style="dim")
        elif rank.activity == "waiting":
            job = Text("waits for storage", style="yellow")
        else:
            job = Text("idle", style="dim")
        step = "" if rank.job_id is None else f"{rank.step}/{rank.steps}"
        share = _bar(rank.busy_share, 10, number, options) + Text(f" {rank.busy_share:4.0%}")
        rows.append([head, rank.device, _steps_of(rank), job, step, share, _memory(rank)])
    headers = ["rank", "device", "steps", "job", "step", "busy", "memory"]
    return _table(headers, rows, right=("rank", "steps", "step", "memory"), flexible="job")


def _flight_table(group: GroupStatus, jobs: Sequence[JobView], snapshot: Snapshot, options: ConsoleOptions) -> Table:
    num_ranks = group.ranks[0].num_ranks
    has_ids = options.max_width >= 110
    has_owners = snapshot.has_several_owners
    owner_width = 2 + max(len("owner"), *(len(job.owner) for job in jobs)) if has_owners else 0
    width = options.max_width - _BESIDE_TRACK - (25 if has_ids else 0) - owner_width
    segment = max(0, min(_MAX_SEGMENT, width // num_ranks - 1))
    is_shown = (has_ids, True, has_owners, segment >= _MIN_SEGMENT, True, True)
    ranks = Text.assemble(*((f"{rank:<{segment + 1}}", _color(rank)) for rank in range(num_ranks)))
    rows: list[tuple[Cell, ...]] = [("id", "in flight", "owner", ranks, "", "")]
    for job in jobs:
        shares, state = progress_of(job, group)
        eta_s = snapshot.estimates[job.id].eta_s if job.id in snapshot.estimates else None
        track = Text(" ").join(
            Text(" " * segment) if share is None else _bar(share, segment, rank, options)
            for rank, share in enumerate(shares)
        )
        eta = Text("" if eta_s is None else f"about {duration(eta_s)}", style="dim")
        rows.append((job.id, job.name, job.owner, track, state, eta))
    headers, *cells = (list(itertools.compress(row, is_shown)) for row in rows)
    return _table(headers, cells, flexible="in flight")


def progress_of(job: JobView, group: GroupStatus) -> tuple[list[float | None], str]:
    """Return the share of its work on a video that each rank has done, None if it has none, and the state in words."""
    if job.rank is None and not (group.intake and job.id in group.intake.places):
        return [0.0] * group.ranks[0].num_ranks, "begins"
    is_denoised = 0 < job.steps <= job.step
    is_decoding = is_denoised and any(rank.rank == job.rank and rank.job_id == job.id for rank in group.ranks)
    shares = _shares_of(job, group, is_decoded=is_denoised and not is_decoding)
    if any(job.id in condition.job_ids for condition in group.conditions):
        return shares, "waits for storage"
    place = group.intake.places.get(job.id) if group.intake else None
    if place is not None and all(rank.job_id != job.id for rank in group.ranks):
        return shares, f"waits for {place}"
    if is_denoised:
        return shares, "decoding" if is_decoding else "being written"
    return shares, job.progress


def _shares_of(job: JobView, group: GroupStatus, *, is_decoded: bool) -> list[float | None]:
    num_ranks = group.ranks[0].num_ranks
    if len(job.boundaries) != num_ranks + 1:
        return [0.0] * num_ranks
    elsewhere = {rank.rank for rank in group.ranks if rank.job_id != job.id}
    shares: list[float | None] = []
    for rank, (first, end) in enumerate(itertools.pairwise(job.boundaries)):
        # The job's record names the step about to run, so on a rank's last step it is the end less one.
        has_left = rank == job.rank and rank in elsewhere and job.step >= end - 1
        if first < end:
            shares.append(1.0 if has_left else min(1.0, max(0.0, (job.step - first) / (end - first))))
        elif rank == job.decoder:
            shares.append(1.0 if is_decoded else 0.0)
        else:
            shares.append(None)
    return shares


def _bar(share: float, width: int, rank: int, options: ConsoleOptions) -> Text:
    done, todo = ("=", "-") if options.ascii_only else ("━", "─")
    cells = min(width, max(0, round(share * width)))
    return Text.assemble((done * cells, _color(rank)), (todo * (width - cells), "dim"))


def _steps_of(rank: RankStatus) -> str:
    if rank.step_range is None:
        return ""
    first, end = rank.step_range
    if first == end:
        return "none"
    return f"{first}-{end - 1}" if end - first > 1 else str(first)


def _memory(rank: RankStatus) -> str:
    if rank.gpu_bytes is not None and rank.gpu_total_bytes:
        return f"{rank.gpu_bytes / 2**30:.1f} of {rank.gpu_total_bytes / 2**30:.0f} GiB"
    return f"{rank.rss_bytes / 2**20:,.0f} MiB"


def _color(rank: int) -> str:
    return _COLORS[rank % len(_COLORS)]


def _table(
    headers: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, right: Sequence[str] = (), flexible: str = ""
) -> Table:
    """Build a table without lines; on a narrow terminal the flexible column shrinks first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        is_flexible = bool(flexible) and header == flexible
        table.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=not is_flexible,
            overflow="ellipsis",
            max_width=_MAX_NAME if is_flexible else None,
        )
    for row in rows:
        # As Text, so that brackets in a name are not read as markup.
        cells = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in row]
        for cell in cells:
            cell.no_wrap, cell.overflow = True, "ellipsis"
        table.add_row(*cells)
    return table
