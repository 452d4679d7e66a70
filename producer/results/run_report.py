"""Summarizes a run from the jobs in Redis, which has failures but expires, and the sidecars beside the videos."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import redis

from svdq.producer import keys
from svdq.producer.queue import ENDED, End, queues
from svdq.producer.results.finished_videos import find_results
from svdq.producer.status.job_view import view_many
from svdq.producer.status.registries import counts
from svdq.producer.storage.storage import Storage
from svdq.producer.text import duration, pace, rfc3339
from svdq.producer.untrusted_job import AT_ONCE

LEFT = ("queued", "started", "scheduled", "deferred")
MAX_NAMES = 5  # failed jobs named for each reason


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One job that has ended."""

    id: str
    name: str
    status: End
    ended_at: datetime
    error: str = ""
    source: str = ""  # where its photo was: two cameras may both have an IMG_0001
    owner: str = ""  # whose job it was; "" for none
    #: When its group took it; of a sidecar alone, its end less its seconds of work, between which rounds do others.
    begun_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The figures of a run or of any period."""

    since: datetime
    until: datetime
    ending: str  # why the run ended, as a sentence; "" for a period
    jobs: tuple[RunRecord, ...]  # that ended in the period, in the order of their ends, each once
    left: Mapping[str, int]
    videos_per_hour: float | None  # from the start of the first to the end of the last

    def count(self, *statuses: End) -> int:
        """Count the jobs that ended in one of these states."""
        return sum(job.status in statuses for job in self.jobs)

    @property
    def reasons(self) -> list[tuple[str, list[RunRecord]]]:
        """The failed jobs by reason, the most frequent reason first."""
        failed = [job for job in self.jobs if job.status == "failed"]
        counted = Counter(job.error for job in failed)
        return [(reason, [job for job in failed if job.error == reason]) for reason, _ in counted.most_common()]

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "since": rfc3339(self.since),
            "until": rfc3339(self.until),
            "ending": self.ending or None,
            **{status: self.count(status) for status in ENDED},
            "videos_per_hour": None if self.videos_per_hour is None else round(self.videos_per_hour, 2),
            "left": {state: self.left.get(state, 0) for state in LEFT},
            "jobs": [
                {name: value for name, value in asdict(job).items() if name != "begun_at"}
                | {"ended_at": rfc3339(job.ended_at), "error": job.error or None}
                for job in self.jobs
            ],
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        ended = ", ".join(f"{self.count(status):,} {status}" for status in ENDED)
        lines = [f"{ended}, {self.period}."]
        lines += [] if self.videos_per_hour is None else [f"{pace(self.videos_per_hour)}."]
        lines += [self.ending] if self.ending else []
        lines += self._lines_of_owners()
        lines.append(f"Left: {', '.join(f'{self.left.get(status, 0):,} {status}' for status in LEFT)}.")
        for reason, jobs in self.reasons:
            names = ", ".join(f"{job.source or job.name} ({job.id})" for job in jobs[:MAX_NAMES])
            more = f" and {len(jobs) - MAX_NAMES:,} more" if len(jobs) > MAX_NAMES else ""
            lines.append(f"Failed, {len(jobs):,} x: {reason} {names}{more}")
        return lines

    def _lines_of_owners(self) -> list[str]:
        """Return a line for each owner if there are several."""
        owners = sorted({job.owner for job in self.jobs})
        if len([owner for owner in owners if owner]) < 2:
            return []
        counted = Counter((job.owner, job.status) for job in self.jobs)
        return [
            f"{owner or 'Without an owner'}: "
            + ", ".join(f"{counted[owner, status]:,} {status}" for status in ENDED if counted[owner, status])
            + "."
            for owner in owners
        ]

    @property
    def period(self) -> str:
        """The period in words, in local time."""
        since, until = self.since.astimezone(), self.until.astimezone()
        end = until.strftime("%H:%M" if since.date() == until.date() else "%Y-%m-%d %H:%M")
        return f"from {since:%Y-%m-%d %H:%M} to {end} ({duration((until - since).total_seconds())})"


def summarize(
    records: Iterable[RunRecord], left: Mapping[str, int], *, since: datetime, until: datetime, ending: str = ""
) -> RunReport:
    """Summarize what ended in a period, by newest records; with an `ending` the pace counts the whole period."""
    jobs = _newest_of_each_job(record for record in records if since <= record.ended_at <= until)
    finished = [job for job in jobs if job.status == "finished"]
    span = until - since
    if not ending:
        begun = [job.begun_at or job.ended_at for job in finished]
        span = max((job.ended_at for job in finished), default=until) - min(begun, default=until)
    return RunReport(
        since=since,
        until=until,
        ending=ending,
        jobs=tuple(jobs),
        left=left,
        videos_per_hour=len(finished) * timedelta(hours=1) / span if finished and span else None,
    )


def _newest_of_each_job(records: Iterable[RunRecord]) -> list[RunRecord]:
    newest: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: record.ended_at):
        before = newest.pop(record.id, None)
        if before is not None and not record.owner:  # as in sidecars of earlier versions
            record = replace(record, owner=before.owner)
        if before is not None and before.status == record.status and record.begun_at is None:
            record = replace(record, begun_at=before.begun_at)
        newest[record.id] = record
    return list(newest.values())


def records_from_redis(
    connection: redis.Redis, since: datetime, until: datetime, on_bad: Callable[[str], None]
) -> Iterator[RunRecord]:
    """Find the jobs that ended in a period; `on_bad` is called with a sentence for each unreadable one."""
    # RQ sorts ended jobs by expiry: those that expire too early are not read. Clocks may differ by a day.
    earliest = since.timestamp() - keys.DAY_S
    ids: list[str] = []
    for queue in queues(connection):
        for registry, kept_s in (
            (queue.finished_job_registry, keys.RESULT_TTL_S),
            (queue.failed_job_registry, keys.FAILURE_TTL_S),
            (queue.canceled_job_registry, 0),
        ):
            found: Any = connection.zrangebyscore(registry.key, earliest + kept_s, "+inf")
            ids += [job_id.decode(errors="backslashreplace") for job_id in found]
    for start in range(0, len(ids), AT_ONCE):
        for view in view_many(connection, ids[start : start + AT_ONCE]):
            if not view.is_readable:
                on_bad(f"{view.error} It is left out.")
                continue
            # It may be queued again.
            status = next((end for end in ENDED if end == view.status), None)
            if status is not None and view.ended_at is not None and since <= view.ended_at <= until:
                error = view.error if status == "failed" else None
                yield RunRecord(
                    id=view.id,
                    name=view.name,
                    source=view.source,
                    owner=view.owner,
                    status=status,
                    ended_at=view.ended_at,
                    error=error or "",
                    begun_at=view.started_at,
                )


def records_from_storage(storage: Storage, since: datetime, on_bad: Callable[[str], None]) -> Iterator[RunRecord]:
    """Find the videos finished since a time; `on_bad` is called with a sentence for each bad sidecar."""
    for result in find_results(storage, since=since, on_bad=on_bad):
        yield RunRecord(
            id=result.job_id,
            name=result.document.name,
            source=result.document.source,
            owner=result.document.owner,
            status="finished",
            ended_at=result.finished_at,
            begun_at=result.finished_at - work if (work := result.document.work) else None,
        )


def left_to_others(connection: redis.Redis) -> Counter[str]:
    """Count the queued jobs that workers leave to others, by what these wait for."""
    job_ids = [job_id for queue in queues(connection) if queue.unable for job_id in queue.get_job_ids()]
    return Counter(view.waits_for for view in view_many(connection, job_ids) if view.waits_for)


def jobs_left(connection: redis.Redis) -> dict[str, int]:
    """Count the unfinished jobs of all queues by state."""
    of_queues = counts(connection).values()
    return {status: sum(by_status[status] for by_status in of_queues) for status in LEFT}
