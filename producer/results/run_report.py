"""Summarizes a run: number of videos, pace, failures with reasons, and what is left. Pure code.

The figures are computed from records of ended jobs. `run_records` collects them from Redis and from the sidecars beside
the videos.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

import redis
from rq.registry import BaseRegistry, FailedJobRegistry, FinishedJobRegistry

from svdq.producer import keys
from svdq.producer.queue import queues
from svdq.producer.results.finished_videos import Result, find_results
from svdq.producer.status.job_view import view_many
from svdq.producer.status.registries import counts
from svdq.producer.storage.storage import Storage
from svdq.producer.text import duration, pace, rfc3339
from svdq.producer.untrusted_job import AT_ONCE

#: States of unfinished jobs, in the order of the report.
LEFT = ("queued", "started", "scheduled", "deferred")
#: Largest number of failed jobs named for each reason.
MAX_NAMES = 5

End = Literal["finished", "failed", "stopped", "canceled"]


@dataclass(frozen=True, kw_only=True)
class RenderCost:
    """The costs of a video for its group."""

    #: Name of the group that rendered it, and its number of ranks.
    group: str
    num_ranks: int
    #: Seconds of encoding, denoising and decoding, over all ranks.
    compute_s: float
    #: When the encode began, estimated from the seconds.
    begun_at: datetime


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One job that has ended."""

    #: Id and name of the job.
    id: str
    name: str
    #: RQ's status: stopped means that the user canceled the job in flight.
    status: End
    #: When it ended, with a time zone.
    ended_at: datetime
    #: Why it failed, as a sentence.
    error: str = ""
    #: What it cost; None if this was not recorded.
    cost: RenderCost | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The figures of a run or of any period."""

    #: Start and end of the period.
    since: datetime
    until: datetime
    #: Why the run ended, as a sentence; "" for a period.
    ending: str
    #: The jobs that ended in the period, in the order of their ends, each once.
    jobs: tuple[RunRecord, ...]
    #: Unfinished jobs by state.
    left: Mapping[str, int]
    #: Finished videos per hour, from the start of the first to the end of the last; None without any.
    videos_per_hour: float | None
    #: Share of the ranks' time spent on finished videos, 0 to 1; None if unknown.
    busy_share: float | None

    def count(self, *statuses: End) -> int:
        """Count the jobs that ended in one of these states."""
        return sum(job.status in statuses for job in self.jobs)

    @property
    def reasons(self) -> list[tuple[str, list[RunRecord]]]:
        """Return the failed jobs by reason, the most frequent reason first."""
        failed = [job for job in self.jobs if job.status == "failed"]
        counted = Counter(job.error for job in failed)
        return [(reason, [job for job in failed if job.error == reason]) for reason, _ in counted.most_common()]

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "since": rfc3339(self.since),
            "until": rfc3339(self.until),
            "ending": self.ending or None,
            "finished": self.count("finished"),
            "failed": self.count("failed"),
            "stopped": self.count("stopped"),
            "canceled": self.count("canceled"),
            "videos_per_hour": None if self.videos_per_hour is None else round(self.videos_per_hour, 2),
            "busy_share": None if self.busy_share is None else round(self.busy_share, 3),
            "left": {state: self.left.get(state, 0) for state in LEFT},
            "jobs": [
                {name: value for name, value in asdict(job).items() if name != "cost"}
                | {"ended_at": rfc3339(job.ended_at), "error": job.error or None}
                for job in self.jobs
            ],
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        statuses: tuple[End, ...] = ("finished", "failed", "stopped", "canceled")
        ended = ", ".join(f"{self.count(status):,} {status}" for status in statuses)
        rates = [] if self.videos_per_hour is None else [pace(self.videos_per_hour)]
        rates += [] if self.busy_share is None else [f"ranks busy {self.busy_share:.0%}"]
        lines = [f"{ended}, {self.period}."]
        lines += [f"{', '.join(rates)}."] if rates else []
        lines += [self.ending] if self.ending else []
        lines.append(f"Left: {', '.join(f'{self.left.get(status, 0):,} {status}' for status in LEFT)}.")
        for reason, jobs in self.reasons:
            names = ", ".join(f"{job.name} ({job.id})" for job in jobs[:MAX_NAMES])
            more = f" and {len(jobs) - MAX_NAMES:,} more" if len(jobs) > MAX_NAMES else ""
            lines.append(f"Failed, {len(jobs):,} x: {reason} {names}{more}")
        return lines

    @property
    def period(self) -> str:
        """The period in words, in local time."""
        since, until = self.since.astimezone(), self.until.astimezone()
        end = until.strftime("%H:%M" if since.date() == until.date() else "%Y-%m-%d %H:%M")
        return f"from {since:%Y-%m-%d %H:%M} to {end} ({duration((until - since).total_seconds())})"


def summarize(
    records: Iterable[RunRecord],
    left: Mapping[str, int],
    *,
    since: datetime,
    until: datetime,
    ending: str = "",
    num_ranks: int | None = None,
) -> RunReport:
    """Summarize what ended in a period.

    The newest record of a job counts. `num_ranks` is the number of ranks that ran for the whole period; None counts
    each group from the start of its first video to the end of its last.
    """
    jobs = _each_once(record for record in records if since <= record.ended_at <= until)
    finished = [job for job in jobs if job.status == "finished"]
    costs = [(job.cost, job.ended_at) for job in finished if job.cost is not None]
    if num_ranks is None:
        start = min([cost.begun_at for cost, _ in costs] + [job.ended_at for job in finished], default=until)
        span = max((job.ended_at for job in finished), default=until) - start
        ranks_s = _ranks_s(costs)
    else:
        span = until - since
        ranks_s = num_ranks * span.total_seconds()
    compute_s = sum(cost.compute_s for cost, _ in costs)
    return RunReport(
        since=since,
        until=until,
        ending=ending,
        jobs=tuple(jobs),
        left=left,
        videos_per_hour=len(finished) * timedelta(hours=1) / span if finished and span else None,
        busy_share=compute_s / ranks_s if costs and ranks_s else None,
    )


def _each_once(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Keep the newest record of each job, completed from older records of the same end."""
    newest: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: record.ended_at):
        before = newest.pop(record.id, None)
        if before is not None and before.status == record.status and record.cost is None:
            record = replace(record, cost=before.cost)
        newest[record.id] = record
    return list(newest.values())


def _ranks_s(costs: Sequence[tuple[RenderCost, datetime]]) -> float:
    """Sum the rank-seconds of groups: from the start of a group's first video to the end of its last."""
    total_s = 0.0
    for group in {cost.group for cost, _ in costs}:
        ours = [(cost, ended_at) for cost, ended_at in costs if cost.group == group]
        span = max(ended_at for _, ended_at in ours) - min(cost.begun_at for cost, _ in ours)
        total_s += max(cost.num_ranks for cost, _ in ours) * span.total_seconds()
    return total_s


#: Seconds by which the clocks of Redis and of workers may differ.
SLACK_S = 24 * 60 * 60
#: Phases that keep a rank busy; files are written in parallel with the next video.
_COMPUTE = ("encode", "denoise", "decode")
#: Largest values accepted from a sidecar: a year, and more ranks than any group has.
MAX_SECONDS, MAX_RANKS = 366 * 24 * 60 * 60.0, 10_000


def records_from_redis(
    connection: redis.Redis, since: datetime, until: datetime, on_bad: Callable[[str], None] = lambda reason: None
) -> Iterator[RunRecord]:
    """Find the jobs of all queues that ended in a period.

    `on_bad` is called with a sentence for each job that cannot be read, which is left out.
    """
    for queue in queues(connection):
        for registry in (queue.finished_job_registry, queue.failed_job_registry, queue.canceled_job_registry):
            yield from _ended_in(connection, registry, since, until, on_bad)


def records_from_storage(
    storage: Storage, since: datetime, on_bad: Callable[[str], None] = lambda reason: None
) -> Iterator[RunRecord]:
    """Find the videos that were finished since a time, with their costs.

    `on_bad` is called with a sentence for each JSON file that is not a sidecar, which is left out.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    for result in find_results(storage, since=since, on_bad=on_bad):
        yield RunRecord(
            id=result.job_id,
            name=result.name,
            status="finished",
            ended_at=result.finished_at,
            cost=_cost_of(result),
        )


def jobs_left(connection: redis.Redis) -> dict[str, int]:
    """Count the unfinished jobs of all queues by state."""
    total: Counter[str] = Counter()
    for by_status in counts(connection).values():
        total.update({status: by_status[status] for status in LEFT})
    return dict(total)


def _ended_in(
    connection: redis.Redis, registry: BaseRegistry, since: datetime, until: datetime, on_bad: Callable[[str], None]
) -> Iterator[RunRecord]:
    """Find the jobs of a registry that ended in a period.

    RQ sorts ended jobs by expiry. svdq keeps all of a status equally long, so those that expire too early are not read.
    """
    kept_s = {FinishedJobRegistry: keys.RESULT_TTL_S, FailedJobRegistry: keys.FAILURE_TTL_S}.get(type(registry), 0)
    least = since.timestamp() + kept_s - SLACK_S
    found: Any = connection.zrangebyscore(registry.key, least, "+inf")
    ids = [job_id.decode(errors="backslashreplace") for job_id in found]
    for start in range(0, len(ids), AT_ONCE):
        for view in view_many(connection, ids[start : start + AT_ONCE]):
            if not view.is_readable:
                on_bad(f"{view.error} It is left out.")
                continue
            # It may be queued again.
            status = next((end for end in get_args(End) if end == view.status), None)
            if status is not None and view.ended_at is not None and since <= view.ended_at <= until:
                error = view.error if status == "failed" else None
                yield RunRecord(id=view.id, name=view.name, status=status, ended_at=view.ended_at, error=error or "")


def _cost_of(result: Result) -> RenderCost | None:
    """Read the costs of a video; None if its sidecar lacks them, as in earlier versions."""
    try:
        seconds, group = result.document["seconds"], result.document["group"]
        took_s = sum(float(value) for value in seconds.values())
        compute_s = sum(float(seconds.get(part, 0.0)) for part in _COMPUTE)
        num_ranks = int(group["ranks"])
        if not (0 <= compute_s <= took_s < MAX_SECONDS and 1 <= num_ranks <= MAX_RANKS):
            return None
        return RenderCost(
            group=f"{group['host']}:{group['pid']}",
            num_ranks=num_ranks,
            compute_s=compute_s,
            begun_at=result.finished_at - timedelta(seconds=took_s),
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
