"""Everything at one moment: queues, groups with their ranks, jobs in flight, pace, and when all will be done.

What a live view shows again and again, so it asks little: a dozen round trips whose length follows what is in flight,
however many jobs are kept. Knows no terminal.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import rq
from rq.job import JobStatus
from rq.utils import as_text

from svdq.producer import keys
from svdq.producer.control import pauses
from svdq.producer.queue import queues
from svdq.producer.status.eta import queue_eta_s, videos_a_second
from svdq.producer.status.outlook import Outlook, outlooks
from svdq.producer.status.ranks import GroupStatus, read_groups
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.status import JobView, QueueView, view_many, view_queues

#: Jobs of one queue in flight that are looked at, at most; groups of all sizes have fewer.
MAX_IN_FLIGHT = 200
#: Seconds over which what has ended is counted.
LATELY_S = 3600


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How all stands at one moment."""

    #: Seconds since the epoch.
    at: float
    #: Most urgent first.
    queues: tuple[QueueView, ...]
    #: By name.
    groups: tuple[GroupStatus, ...]
    #: Jobs in flight: group by group, the longest in flight first; then those of groups that have not spoken lately.
    jobs: tuple[JobView, ...]
    #: The name of the RQ worker that has each of them, by job id.
    owners: Mapping[str, str]
    #: Names of jobs by id: of those in flight, and of those that a rank's record still names.
    names: Mapping[str, str]
    #: What is to be expected of jobs in flight, by job id.
    outlooks: Mapping[str, Outlook]
    #: Why jobs are not taken, a sentence each.
    pauses: tuple[str, ...]
    #: Jobs that have ended in the last hour; RQ counts stopped ones as failed.
    finished_last_hour: int
    failed_last_hour: int
    #: At the present pace of all groups; None until a group has finished a video.
    videos_per_hour: float | None
    #: Seconds until all that waits and all that is in flight is done; None while that cannot be told.
    eta_s: float | None

    @property
    def num_queued(self) -> int:
        """Jobs that wait in a queue."""
        return sum(queue.counts["queued"] for queue in self.queues)

    def jobs_of(self, group: GroupStatus) -> list[JobView]:
        """Pick the jobs that a group has in flight, the longest in flight first."""
        return [job for job in self.jobs if self._is_of(job, group)]

    @property
    def strays(self) -> list[JobView]:
        """The jobs in flight that no group which has spoken lately has."""
        return [job for job in self.jobs if not any(self._is_of(job, group) for group in self.groups)]

    def _is_of(self, job: JobView, group: GroupStatus) -> bool:
        # A group tells of its jobs once a second, and may have taken this one since.
        intake = group.intake
        return intake is not None and (job.id in intake.in_flight or self.owners.get(job.id) == intake.worker)

    def as_json(self) -> dict[str, Any]:
        """One JSON object; its fields are named as in `svdq info --json`."""
        return {
            "at": round(self.at, 3),
            "queues": [{"name": queue.name, **queue.counts} for queue in self.queues],
            "finished_last_hour": self.finished_last_hour,
            "failed_last_hour": self.failed_last_hour,
            "videos_per_hour": None if self.videos_per_hour is None else round(self.videos_per_hour, 1),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "ranks": [rank.model_dump(mode="json") for group in self.groups for rank in group.ranks],
            "jobs": [job.as_json() | self.outlooks.get(job.id, Outlook()).as_json() for job in self.jobs],
            "pauses": list(self.pauses),
        }


def take(connection: redis.Redis) -> Snapshot:
    """Look at everything."""
    now = time.time()
    of_queues = view_queues(connection)
    groups = read_groups(connection)
    reasons = pauses(connection)
    known = _known(connection, groups)
    # Some that a rank's record names have ended since.
    jobs = [view for view in known if view.status == JobStatus.STARTED.value]
    finished, failed = _ended_lately(connection, now)
    num_queued = sum(queue.counts["queued"] for queue in of_queues)
    rate = videos_a_second(groups)
    return Snapshot(
        at=now,
        queues=tuple(of_queues),
        groups=tuple(groups),
        jobs=tuple(jobs),
        owners=_owners(connection, jobs),
        names={view.id: view.name for view in known},
        outlooks=outlooks(connection, jobs, groups),
        pauses=tuple(reasons),
        finished_last_hour=finished,
        failed_last_hour=failed,
        videos_per_hour=rate * 3600 if rate else None,
        # Nobody can tell when a person will resume what waits.
        eta_s=None if reasons and num_queued else queue_eta_s(num_queued, groups),
    )


def _known(connection: redis.Redis, groups: Sequence[GroupStatus]) -> list[JobView]:
    """Look at the jobs that groups tell of and those that RQ has as started, in the order of `Snapshot.jobs`."""
    in_flight = [job_id for group in groups if group.intake for job_id in group.intake.in_flight]
    computed = [rank.job_id for group in groups for rank in group.ranks if rank.job_id]
    started = sorted(newest_ids(connection, MAX_IN_FLIGHT, (JobStatus.STARTED.value,)))
    job_ids = list(dict.fromkeys([*in_flight, *computed, *started]))
    return view_many(connection, job_ids) if job_ids else []


def _owners(connection: redis.Redis, jobs: Sequence[JobView]) -> dict[str, str]:
    with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hget(rq.job.Job.key_for(job.id), "worker_name")
        names = pipeline.execute()
    return {job.id: as_text(name) for job, name in zip(jobs, names, strict=True) if name}


def _ended_lately(connection: redis.Redis, now: float) -> Sequence[int]:
    """Count the jobs that have finished and those that have failed lately: registries are sorted by expiry."""
    since = now - LATELY_S
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.zcount(queue.finished_job_registry.key, since + keys.RESULT_TTL_S, "+inf")
            pipeline.zcount(queue.failed_job_registry.key, since + keys.FAILURE_TTL_S, "+inf")
        answers = pipeline.execute()
    return sum(answers[::2]), sum(answers[1::2])
