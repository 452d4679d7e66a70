"""A snapshot of queues, workers, groups, ranks and jobs in flight, in a few round trips for any number of jobs."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import redis
from rq.job import JobStatus

from svdq.producer.job_control import pauses, read_pauses
from svdq.producer.queue import SvdqQueue, read_job
from svdq.producer.status import registries
from svdq.producer.status.estimates import (
    NO_WORKER,
    STARTING,
    Backlog,
    Estimate,
    Parameters,
    estimate_all,
    estimate_jobs,
    videos_per_s,
)
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.ranks import (
    Condition,
    GroupFinder,
    GroupStatus,
    RankStatus,
    conditions_of,
    read_groups,
    reading_groups,
)
from svdq.producer.status.registries import WorkerState, WorkerView
from svdq.producer.text import iso_of
from svdq.producer.together import ask
from svdq.producer.untrusted_job import UntrustedJob, read_many

V = TypeVar("V")

MAX_IN_FLIGHT = 200  # per queue; groups have fewer
#: Largest number of queued jobs read for an estimate, taken evenly from each queue in this many slices.
SAMPLED = 200
SLICES = 10


class Recent(Generic[V]):
    """What was read about queued jobs, which do not change, for a reader that looks each second."""

    def __init__(self) -> None:
        self._known: dict[str, V] = {}

    def read(self, job_ids: Sequence[str], read: Callable[[list[str]], Iterable[tuple[str, V]]]) -> list[V]:
        """Return what `read` finds about jobs, in their order; jobs of the last call are not read again."""
        known = self._known | dict(read([job_id for job_id in job_ids if job_id not in self._known]))
        self._known = {job_id: known[job_id] for job_id in job_ids if job_id in known}
        return list(self._known.values())


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of everything at one moment; groups and workers are sorted by name."""

    at: float  # seconds since the epoch
    queues: Mapping[str, Mapping[str, int]]  # number of jobs by queue, the most urgent first, and by status
    workers: tuple[WorkerView, ...]
    #: Whether one of them takes jobs, or is about to; and why there may be no group, as a sentence.
    worker_state: WorkerState
    no_group: str
    groups: tuple[GroupStatus, ...]
    jobs: tuple[JobView, ...]  # in flight: by group, longest first; then of groups without records
    names: Mapping[str, str]  # of jobs in flight, and of jobs in records of ranks, by id
    estimates: Mapping[str, Estimate]
    waiting: Backlog
    pauses: tuple[str, ...]
    finished_last_hour: int
    failed_last_hour: int
    videos_per_hour: float | None
    has_several_owners: bool  # whether owners are shown
    estimate: Estimate

    @cached_property
    def finder(self) -> GroupFinder:
        """Finds the groups of jobs in flight."""
        return GroupFinder(self.groups)

    @cached_property
    def jobs_by_group(self) -> Mapping[str | None, list[JobView]]:
        """The jobs in flight by the name of their group, the longest in flight first; None is no group."""
        found: dict[str | None, list[JobView]] = {}
        for job in self.jobs:
            group = self.finder.find(job.id, job.worker)
            found.setdefault(group.name if group else None, []).append(job)
        return found

    @property
    def conditions(self) -> list[tuple[RankStatus, Condition]]:
        """The outages that ranks wait out, each with its rank."""
        return conditions_of(self.groups)

    @property
    def failed_gpus(self) -> list[str]:
        """A sentence for each GPU that has failed and was left out."""
        return [sentence for group in self.groups for sentence in group.failed_gpus.values()]

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "at": iso_of(self.at),
            "queues": [{"name": name, **counts} for name, counts in self.queues.items()],
            "finished_last_hour": self.finished_last_hour,
            "failed_last_hour": self.failed_last_hour,
            "videos_per_hour": None if self.videos_per_hour is None else round(self.videos_per_hour, 1),
            "eta_s": None if self.estimate.eta_s is None else round(self.estimate.eta_s, 1),
            "eta_reason": self.estimate.reason or None,
            "workers": [worker.model_dump() for worker in self.workers],
            "ranks": [rank.as_json() for group in self.groups for rank in group.ranks],
            "jobs": [job.as_json() | self.estimates.get(job.id, Estimate()).as_json() for job in self.jobs],
            "pauses": list(self.pauses),
            "conditions": [
                {"host": rank.host, "rank": rank.rank, **condition.as_json()} for rank, condition in self.conditions
            ],
        }


def take(connection: redis.Redis, recent: Recent[Parameters] | None = None) -> Snapshot:
    """Take a snapshot; `recent` has what is known of the sampled jobs."""
    now = time.time()
    started_only, deferred_only = (JobStatus.STARTED.value,), (JobStatus.DEFERRED.value,)
    of_queues, groups, started, deferred, workers, state, (num_finished, num_failed), reasons, several = ask(
        connection,
        registries.read_counts(connection),
        reading_groups(),
        registries.read_newest_ids(connection, MAX_IN_FLIGHT, started_only),
        registries.read_newest_ids(connection, SAMPLED // 4, deferred_only),
        registries.read_workers(),
        registries.read_worker_state(),
        registries.num_ended_since(connection, now - 3600),
        read_pauses(),
        registries.read_several_owners(),
    )
    in_flight = [job_id for group in groups if group.intake for job_id in group.intake.in_flight]
    computed = [rank.job_id for group in groups for rank in group.ranks if rank.job_id]
    known = view_many(connection, dict.fromkeys([*in_flight, *computed, *sorted(started)]))
    # Some jobs in records of ranks have ended meanwhile.
    jobs = [view for view in known if view.status == JobStatus.STARTED.value]
    num_deferred = sum(by_status["deferred"] for by_status in of_queues.values())
    waiting = read_waiting(connection, of_queues, recent=recent)
    if deferred:
        waiting = _with_deferred(connection, waiting, num_deferred, view_many(connection, deferred), groups)
    rate = videos_per_s(groups)
    no_group = _no_group(state)
    return Snapshot(
        at=now,
        queues=of_queues,
        workers=tuple(workers),
        worker_state=state,
        no_group=no_group,
        groups=tuple(groups),
        jobs=tuple(jobs),
        names={view.id: view.name for view in known},
        estimates=estimate_jobs(jobs, waiting, groups, reasons, no_group),
        waiting=waiting,
        pauses=tuple(reasons),
        finished_last_hour=num_finished,
        failed_last_hour=num_failed,
        videos_per_hour=rate * 3600 if rate else None,
        has_several_owners=several,
        estimate=estimate_all([job for job in jobs if job.is_readable], waiting, groups, reasons, no_group),
    )


def _with_deferred(
    connection: redis.Redis, waiting: Backlog, number: int, views: Sequence[JobView], groups: Sequence[GroupStatus]
) -> Backlog:
    """Add the jobs that wait for others, of which `views` are some; those that wait for canceled jobs do not count."""
    found = estimate(connection, views, groups) if views else {}
    after = [view for view in views if view.id in found]
    return replace(
        waiting,
        num_jobs=waiting.num_jobs + number * len(after) // max(1, len(views)),
        sample=[*waiting.sample, *(view.parameters for view in after)],
        end_s=max((found[view.id].eta_s or 0.0 for view in after), default=0.0),
    )


def estimate(
    connection: redis.Redis, views: Sequence[JobView], groups: Sequence[GroupStatus] | None = None
) -> dict[str, Estimate]:
    """Estimate when given jobs will be done, and those that they wait for."""
    groups = read_groups(connection) if groups is None else groups
    known = {view.id: view for view in views}
    while missing := [job_id for view in known.values() for job_id in view.after if job_id not in known]:
        more = {view.id: view for view in view_many(connection, dict.fromkeys(missing))}
        if not more:
            break
        known |= more
    views = list(known.values())
    queued = {view.id: view.queue for view in views if view.status == JobStatus.QUEUED.value}
    waiting = read_waiting(connection, registries.counts(connection), queued) if queued else Backlog()
    no_group = NO_WORKER if groups else _no_group(registries.worker_state(connection))
    return estimate_jobs(views, waiting, groups, pauses(connection), no_group)


def read_waiting(
    connection: redis.Redis,
    of_queues: Mapping[str, Mapping[str, int]],
    places: Mapping[str, str] | None = None,
    recent: Recent[Parameters] | None = None,
) -> Backlog:
    """Sample the queued jobs evenly, and find the positions of those in `places`, queues by job id."""
    num_jobs = {name: by_status["queued"] for name, by_status in of_queues.items()}
    with connection.pipeline(transaction=False) as pipeline:
        for name, number in num_jobs.items():
            queue = SvdqQueue(name, connection=connection)
            length = math.ceil(number * min(1, SAMPLED / max(1, sum(num_jobs.values()))) / SLICES)
            for first in range(0, number, max(1, length, math.ceil(number / SLICES))):
                pipeline.lrange(queue.key, first, first + length - 1)
        ids = [job_id.decode(errors="backslashreplace") for answer in pipeline.execute() for job_id in answer]

    def read(job_ids: list[str]) -> Iterator[tuple[str, Parameters]]:
        for job_id, record in zip(job_ids, read_many(connection, job_ids), strict=True):
            if isinstance(record, UntrustedJob) and (job := read_job(record)) is not None:
                yield job_id, job.model_dump()

    return Backlog(
        num_jobs=sum(num_jobs.values()),
        sample=(recent or Recent()).read(ids, read),
        num_ahead=registries.num_ahead(connection, places) if places else {},
    )


def _no_group(state: WorkerState) -> str:
    return STARTING if state == "starting" else NO_WORKER
