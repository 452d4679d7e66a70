"""Composes what `svdq status` and `svdq top` show of a snapshot: queues, ranks and videos in flight."""

import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from svdq.cli.formatting import clock, condition_sentence, describe, sentence_of_workers, table, webhook_sentences
from svdq.producer.keys import STATUSES
from svdq.producer.status.job_view import JobView
from svdq.producer.status.ranks import GroupStatus, RankStatus
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.text import count, duration, pace, printable

Styled = tuple[str, str]  # a text, and its style as rich names it; "" for none
Line = tuple[Styled, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table without lines."""

    headers: Sequence[Line]
    rows: Sequence[Sequence[Line]]
    right: Sequence[int] = ()  # the columns that are aligned to the right
    flexible: int | None = None  # the column that shrinks first on a narrow terminal


PLAIN_WIDTH = 120  # width of the output when it does not go to a terminal
_COLORS = ("cyan", "green", "magenta", "blue", "yellow")  # of ranks, in rotation, in both tables
_MIN_SEGMENT, _MAX_SEGMENT = 2, 8  # width of a rank's part of a track; narrower tracks are left out
_BESIDE_TRACK = 50  # width of the other columns beside a track


def lines_of(snapshot: Snapshot) -> list[str]:
    """Return a snapshot as lines of text; tables are at most as wide as the terminal."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    lines: list[str] = []
    for part in compose(snapshot, width, is_ascii=is_ascii):
        if isinstance(part, Table):
            rows = [[plain(cell) for cell in row] for row in (part.headers, *part.rows)]
            lines += table(rows, right=part.right, flexible=part.flexible, width=width)
        else:
            lines.append(plain(part).rstrip())
    return lines


def plain(line: Line) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in line)


def compose(
    snapshot: Snapshot, width: int, *, is_ascii: bool, outage: str = "", is_live: bool = False
) -> Iterator[Line | Table]:
    """Compose all parts of a snapshot, the most important ones first.

    `outage` says in a sentence why there is nothing newer; if `is_live`, it fills the screen and a key quits it.
    """
    blank: list[Line] = [] if is_live else [()]
    rate = "" if snapshot.videos_per_hour is None else f"{pace(snapshot.videos_per_hour)}  "
    ended = f"{snapshot.finished_last_hour:,} finished and {snapshot.failed_last_hour:,} failed in the last hour"
    now = datetime.fromtimestamp(snapshot.at)
    yield (("svdq", "bold"), (f" {now:%H:%M:%S}  ", ""), (rate, "bold"), (ended, ""))
    yield ((printable(_forecast(snapshot)), ""), ("  q quits" if is_live else "", "dim"))
    warnings = [f"{outage} This is the last known state."] if outage else []
    conditions = (condition_sentence(*each) for each in snapshot.conditions)
    webhooks = webhook_sentences(snapshot.outbox)
    for sentence in (*warnings, *map(str, snapshot.pauses), *conditions, *snapshot.failed_gpus, *webhooks):
        yield ((printable(sentence), "bold yellow"),)
    yield from blank
    yield _queue_table(snapshot.queues)
    for each in snapshot.groups:
        jobs = snapshot.jobs_by_group.get(each.name, [])
        yield from blank
        yield _group_title(each, len(jobs))
        first = each.ranks[0]
        # How a model file changes its base is on a separate line, which may wrap.
        if first.loras or first.facts.get("defaults"):
            loras = f" with {', '.join(first.loras)}" if first.loras else ""
            yield ((printable(f"model {first.model}{loras}"), "dim"),)
        yield _rank_table(each, snapshot.names, is_ascii)
        if jobs:
            yield from blank
            yield _flight_table(each, jobs, snapshot, width, is_ascii)
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
        yield ((printable(line), ""),)


def _forecast(snapshot: Snapshot) -> str:
    num_left = snapshot.waiting.num_jobs + len(snapshot.jobs)
    eta_s, by = snapshot.estimate.eta_s, snapshot.estimate.by
    if num_left == 0:
        return "No job is waiting or in flight."
    if eta_s is None:
        return f"{num_left:,} to do; the end is unknown: {snapshot.estimate.reason}"
    return f"{num_left:,} to do, done in about {duration(eta_s)}{by}, at {clock(snapshot.at + eta_s)}."


def _queue_table(queues: Mapping[str, Mapping[str, int]]) -> Table:
    shown = {status for counts in queues.values() for status in counts if counts[status]}
    shown |= {"queued", "started", "finished", "failed"}
    statuses = [status for status in STATUSES if status in shown]
    rows = [
        [_cell(name), *(_cell(f"{counts[status]:,}", "" if counts[status] else "dim") for status in statuses)]
        for name, counts in queues.items()
    ]
    return Table(headers=[*map(_cell, ["queue", *statuses])], rows=rows, right=range(1, 1 + len(statuses)))


def _group_title(group: GroupStatus, num_jobs: int) -> Line:
    first = group.ranks[0]
    title = [
        (printable(f"{first.host}:{first.pid}"), "bold"),
        (f"  {count(first.num_ranks, 'rank')}  {num_jobs} in flight", ""),
    ]
    if intake := group.intake:
        if intake.pace_s:
            pace_s = duration(intake.pace_s) if intake.pace_s >= 10 else f"{intake.pace_s:.1f} s"
            title.append((f"  one every {pace_s}", ""))
        title.append((f"  {intake.finished:,} finished", ""))
        if intake.failed:
            title.append((f", {intake.failed:,} failed", "red"))
        if intake.draining:
            title.append(("  takes no more jobs", "yellow"))
    if group.rest is not None:
        title.append((f"  {group.rest}", ""))
    return (*title, (printable(f"  {first.notice or first.model}"), "dim"))


def _rank_table(group: GroupStatus, names: Mapping[str, str], is_ascii: bool) -> Table:
    ranks = {rank.rank: rank for rank in group.ranks}
    rows: list[list[Line]] = []
    for number in range(group.ranks[0].num_ranks):
        head = _cell(str(number), _color(number))
        rank = ranks.get(number)
        if rank is None:
            rows.append([head, (), (), _cell("no recent report", "dim"), (), (), ()])
            continue
        if rank.job_id is not None:
            job = _cell(names.get(rank.job_id, rank.job_id))
        elif rank.activity == "loading":
            job = _cell(rank.loading_text, "dim")
        elif rank.activity == "waiting":
            job = _cell("waits for storage", "yellow")
        elif rank.rest is not None:
            job = _cell(rank.activity, "dim")
        else:
            job = _cell("idle", "dim")
        step = "" if rank.job_id is None else f"{rank.step}/{rank.steps}"
        share = (*_bar(rank.busy_share, 10, number, is_ascii), (f" {rank.busy_share:4.0%}", ""))
        cells = [head, _cell(rank.device), _cell(_steps_of(rank)), job, _cell(step), share, _cell(_memory(rank))]
        rows.append(cells)
    headers = ["rank", "device", "steps", "job", "step", "busy", "memory"]
    return Table(headers=[*map(_cell, headers)], rows=rows, right=(0, 2, 4, 6), flexible=3)


def _flight_table(group: GroupStatus, jobs: Sequence[JobView], snapshot: Snapshot, width: int, is_ascii: bool) -> Table:
    num_ranks = group.ranks[0].num_ranks
    has_ids = width >= 110
    has_owners = snapshot.has_several_owners
    owner_width = 2 + max(len("owner"), *(len(job.owner) for job in jobs)) if has_owners else 0
    room = width - _BESIDE_TRACK - (25 if has_ids else 0) - owner_width
    segment = max(0, min(_MAX_SEGMENT, room // num_ranks - 1))
    is_shown = (has_ids, True, has_owners, segment >= _MIN_SEGMENT, True, True)
    ranks = tuple((f"{rank:<{segment + 1}}", _color(rank)) for rank in range(num_ranks))
    rows: list[tuple[Line, ...]] = [(_cell("id"), _cell("in flight"), _cell("owner"), ranks, (), ())]
    for job in jobs:
        shares, state = progress_of(job, group)
        eta_s = snapshot.estimates[job.id].eta_s if job.id in snapshot.estimates else None
        parts = [
            ((" " * segment, ""),) if share is None else _bar(share, segment, rank, is_ascii)
            for rank, share in enumerate(shares)
        ]
        track = tuple(itertools.chain.from_iterable((*part, (" ", "")) for part in parts))[:-1]
        eta = _cell("" if eta_s is None else f"about {duration(eta_s)}", "dim")
        rows.append((_cell(job.id), _cell(job.name), _cell(job.owner), track, _cell(state), eta))
    headers, *cells = (list(itertools.compress(row, is_shown)) for row in rows)
    return Table(headers=headers, rows=cells, flexible=int(has_ids))


def progress_of(job: JobView, group: GroupStatus) -> tuple[list[float | None], str]:
    """Return the share of its work on a video that each rank has done, None if it has none, and the state in words."""
    if job.rank is None and job.id not in group.places:
        return [0.0] * group.ranks[0].num_ranks, "begins"
    is_denoised = 0 < job.steps <= job.step
    is_decoding = is_denoised and any(rank.rank == job.rank and rank.job_id == job.id for rank in group.ranks)
    shares = _shares_of(job, group, is_decoded=is_denoised and not is_decoding)
    if any(job.id in condition.job_ids for condition in group.conditions):
        return shares, "waits for storage"
    place = group.places.get(job.id)
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


def _bar(share: float, width: int, rank: int, is_ascii: bool) -> Line:
    done, todo = ("=", "-") if is_ascii else ("━", "─")
    cells = min(width, max(0, round(share * width)))
    return (done * cells, _color(rank)), (todo * (width - cells), "dim")


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


def _cell(text: str, style: str = "") -> Line:
    return ((printable(text), style),)
