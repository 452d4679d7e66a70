"""A snapshot of queues, workers, groups, ranks and jobs in flight, in a few round trips for any number of jobs."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import redis
from rq.job import JobStatus

from svdq.producer.outbox import Outbox, reading_outbox
from svdq.producer.pauses import Pause, reading_pauses
from svdq.producer.queue import read_job
from svdq.producer.status import registries
from svdq.producer.status.estimates import (
    NO_WORKER,
    STARTING,
    UNKNOWN_WORKERS,
    Backlog,
    Estimate,
    estimate_all,
    estimate_jobs,
    videos_per_s,
)
from svdq.producer.status.job_view import JobView, read_views, view_many
from svdq.producer.status.ranks import (
    Condition,
    GroupFinder,
    GroupStatus,
    RankStatus,
    conditions_of,
    reading_groups,
)
from svdq.producer.status.registries import WorkerState, WorkerView
from svdq.producer.status.video_costs import Parameters
from svdq.producer.text import iso_of
from svdq.producer.together import Read, ask
from svdq.producer.untrusted_job import UntrustedJob, reading_many

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
        return self.add(job_ids, dict(read(self.missing(job_ids))))

    def missing(self, job_ids: Sequence[str]) -> list[str]:
        """Return the jobs that are to be read."""
        return [job_id for job_id in job_ids if job_id not in self._known]

    def add(self, job_ids: Sequence[str], found: Mapping[str, V]) -> list[V]:
        """Return what is known of jobs, in their order, with what was found of the `missing` ones."""
        known = {**self._known, **found}
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
    pauses: tuple[Pause, ...]
    outbox: Outbox  # of webhooks
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
            "pauses": [each.text for each in self.pauses],
            "conditions": [
                {"host": rank.host, "rank": rank.rank, **condition.as_json()} for rank, condition in self.conditions
            ],
            "webhooks": self.outbox.as_json(),
        }


def take(connection: redis.Redis, recent: Recent[Parameters] | None = None) -> Snapshot:
    """Take a snapshot; `recent` has what is known of the sampled jobs."""
    now = time.time()
    recent = recent or Recent()
    started_only, deferred_only = (JobStatus.STARTED.value,), (JobStatus.DEFERRED.value,)
    of_queues, sampled, groups, started, deferred, (workers, state), ended, reasons, several, outbox = ask(
        connection,
        registries.read_counts(connection),
        registries.read_sample(connection, SAMPLED, SLICES),
        reading_groups(),
        registries.read_newest_ids(connection, MAX_IN_FLIGHT, started_only),
        registries.read_newest_ids(connection, SAMPLED // 4, deferred_only),
        registries.read_workers(),
        registries.num_ended(connection, 3600),
        reading_pauses(),
        registries.read_several_owners(),
        reading_outbox(),
    )
    num_finished, num_failed = ended
    in_flight = [job_id for group in groups for job_id in group.in_flight]
    computed = [rank.job_id for group in groups for rank in group.ranks if rank.job_id]
    known, parameters, after = ask(
        connection,
        read_views(connection, dict.fromkeys([*in_flight, *computed, *sorted(started)])),
        _read_parameters(connection, recent.missing(sampled)),
        read_views(connection, deferred),
    )
    # Some jobs in records of ranks have ended meanwhile.
    jobs = [view for view in known if view.status == JobStatus.STARTED.value]
    num_deferred = sum(by_status["deferred"] for by_status in of_queues.values())
    waiting = Backlog(num_jobs=_num_queued(of_queues), sample=recent.add(sampled, parameters))
    if deferred:
        waiting = _with_deferred(connection, waiting, num_deferred, after, groups)
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
        outbox=outbox,
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
    known = {view.id: view for view in views}
    while missing := [job_id for view in known.values() for job_id in view.after if job_id not in known]:
        more = {view.id: view for view in view_many(connection, dict.fromkeys(missing))}
        if not more:
            break
        known |= more
    views = list(known.values())
    queued = {view.id: view.queue for view in views if view.status == JobStatus.QUEUED.value}
    of_queues, sampled, num_ahead, found, (_, state), reasons = ask(
        connection,
        registries.read_counts(connection),
        registries.read_sample(connection, SAMPLED, SLICES),
        registries.read_num_ahead(connection, queued),
        reading_groups(),
        registries.read_workers(),
        reading_pauses(),
    )
    groups = found if groups is None else groups
    waiting = Backlog()
    if queued:
        in_flight = [job_id for group in groups for job_id in group.in_flight]
        parameters, started = ask(
            connection, _read_parameters(connection, sampled), read_views(connection, dict.fromkeys(in_flight))
        )
        waiting = Backlog(
            num_jobs=_num_queued(of_queues),
            sample=[*parameters.values()],
            num_ahead=num_ahead,
            started=[view for view in started if view.is_readable],
        )
    return estimate_jobs(views, waiting, groups, reasons, NO_WORKER if groups else _no_group(state))


def _num_queued(of_queues: Mapping[str, Mapping[str, int]]) -> int:
    return sum(by_status["queued"] for by_status in of_queues.values())


def _read_parameters(connection: redis.Redis, job_ids: Sequence[str]) -> Read[dict[str, Parameters]]:
    """Read the parameters of jobs, by id; jobs that cannot be read are left out."""
    records = yield from reading_many(connection, job_ids)
    jobs = {record.id: read_job(record) for record in records if isinstance(record, UntrustedJob)}
    return {job_id: job.model_dump() for job_id, job in jobs.items() if job is not None}


def _no_group(state: WorkerState) -> str:
    if state == "unknown":
        return UNKNOWN_WORKERS
    return STARTING if state == "starting" else NO_WORKER
