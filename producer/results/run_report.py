"""What a night's work came to: how many videos, how fast, what failed and why, what is left. Pure: no Redis, no files.

Numbers are counted over records of jobs that have ended, whoever collected them; `run_records` does from Redis and from
the JSON beside the videos.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from svdq.producer.timeparse import duration, rfc3339

#: States of jobs that are still to be done, in the order in which they are told.
LEFT = ("queued", "started", "scheduled", "deferred")
#: Names of failed jobs that are told for each reason.
MAX_NAMES = 5

End = Literal["finished", "failed", "stopped", "canceled"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a video cost its group."""

    #: The group of ranks that made it, and how many ranks it has.
    group: str
    num_ranks: int
    #: Seconds of encoding, denoising and decoding, over all ranks.
    compute_s: float
    #: When the first of them began, as far as the seconds tell.
    begun_at: datetime


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One job that has ended."""

    #: Id and name of the job.
    id: str
    name: str
    #: RQ's status: stopped means that the user canceled it while a group had it.
    status: End
    #: When; has a zone.
    ended_at: datetime
    #: Why it failed, as a sentence.
    error: str = ""
    #: What it cost; None where nobody wrote it down.
    effort: Effort | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The numbers of a run, or of any stretch of time."""

    #: The stretch of time that was looked at.
    since: datetime
    until: datetime
    #: Why the run ended, as a sentence; "" for a stretch of time.
    ending: str
    #: The jobs that ended in it, in the order of their ends, each once.
    jobs: tuple[RunRecord, ...]
    #: Jobs that are still to be done, by state.
    left: Mapping[str, int]
    #: Finished videos an hour, from the beginning of the first to the end of the last; None without any.
    videos_per_hour: float | None
    #: Share of the ranks' time that went into finished videos, 0 to 1; None where it is not known.
    busy_share: float | None

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
        """One JSON object."""
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
                {name: value for name, value in asdict(job).items() if name != "effort"}
                | {"ended_at": rfc3339(job.ended_at), "error": job.error or None}
                for job in self.jobs
            ],
        }

    def lines(self) -> list[str]:
        """Tell it on a terminal or in a mail."""
        told = [
            f"{self.count('finished')} finished, {self.count('failed')} failed, "
            f"{self.count('stopped')} stopped, {self.count('canceled')} canceled, {self.stretch}."
        ]
        pace = [] if self.videos_per_hour is None else [f"{self.videos_per_hour:.1f} videos an hour"]
        pace += [] if self.busy_share is None else [f"ranks busy {self.busy_share:.0%}"]
        told += [f"{', '.join(pace)}."] if pace else []
        told += [self.ending] if self.ending else []
        told.append(f"Left: {', '.join(f'{self.left.get(state, 0)} {state}' for state in LEFT)}.")
        for reason, jobs in self.reasons:
            names = ", ".join(f"{job.name} ({job.id})" for job in jobs[:MAX_NAMES])
            more = f" and {len(jobs) - MAX_NAMES} more" if len(jobs) > MAX_NAMES else ""
            told.append(f"Failed, {len(jobs)} x: {reason} {names}{more}")
        return told

    @property
    def stretch(self) -> str:
        """The stretch of time in words, in local time."""
        since, until = self.since.astimezone(), self.until.astimezone()
        end = until.strftime("%H:%M" if since.date() == until.date() else "%Y-%m-%d %H:%M")
        return f"from {since:%Y-%m-%d %H:%M} to {end} ({duration((until - since).total_seconds())})"


def summarise(
    records: Iterable[RunRecord],
    left: Mapping[str, int],
    *,
    since: datetime,
    until: datetime,
    ending: str = "",
    num_ranks: int | None = None,
) -> RunReport:
    """Count what ended in a stretch of time.

    Args:
        records: of jobs that ended, in any order; of several of one job the newest counts.
        left: jobs that are still to be done, by state.
        since: from when on.
        until: up to when.
        ending: why the run ended, as a sentence.
        num_ranks: the ranks of a run that took all of this time; None: each group counts from the beginning of its
            first video to the end of its last.
    """
    jobs = _each_once(record for record in records if since <= record.ended_at <= until)
    finished = [job for job in jobs if job.status == "finished"]
    efforts = [(job.effort, job.ended_at) for job in finished if job.effort is not None]
    if num_ranks is None:
        start = min([effort.begun_at for effort, _ in efforts] + [job.ended_at for job in finished], default=until)
        span = max((job.ended_at for job in finished), default=until) - start
        ranks_s = _ranks_s(efforts)
    else:
        span = until - since
        ranks_s = num_ranks * span.total_seconds()
    compute_s = sum(effort.compute_s for effort, _ in efforts)
    return RunReport(
        since=since,
        until=until,
        ending=ending,
        jobs=tuple(jobs),
        left=left,
        videos_per_hour=len(finished) * timedelta(hours=1) / span if finished and span else None,
        busy_share=compute_s / ranks_s if efforts and ranks_s else None,
    )


def _each_once(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Keep the newest record of each job, with what others know of the same end."""
    newest: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: record.ended_at):
        before = newest.pop(record.id, None)
        if before is not None and before.status == record.status and record.effort is None:
            record = replace(record, effort=before.effort)
        newest[record.id] = record
    return list(newest.values())


def _ranks_s(efforts: Sequence[tuple[Effort, datetime]]) -> float:
    """Add up the seconds that groups had: from the beginning of a group's first video to the end of its last."""
    total_s = 0.0
    for group in {effort.group for effort, _ in efforts}:
        ours = [(effort, ended_at) for effort, ended_at in efforts if effort.group == group]
        span = max(ended_at for _, ended_at in ours) - min(effort.begun_at for effort, _ in ours)
        total_s += max(effort.num_ranks for effort, _ in ours) * span.total_seconds()
    return total_s
