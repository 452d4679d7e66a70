"""What is known of jobs, queues and workers. Knows no terminal.

Reads only: RQ's clean-up is never run here, for it may call functions that whoever writes to Redis has chosen.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import redis
import rq
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from svdq.producer.queue import SvdqQueue, fetch, queues, read_job

#: States in which a job stays.
ENDED = frozenset({"finished", "failed", "stopped", "canceled"})

#: The class in front of the sentence on a traceback's last line, such as `svdq.pipeline.errors.SampleError: `.
_EXCEPTION_CLASS = re.compile(r"^(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)): ")


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One job as it stands now."""

    #: Id of the job.
    id: str
    #: RQ's words: queued, started, finished, failed, …
    status: str
    #: Denoising steps done.
    step: int
    #: Denoising steps in all.
    steps: int
    #: The rank that has it, while it is started.
    rank: int | None
    #: Paths or URLs of its files, once it is finished.
    outputs: tuple[str, ...]
    #: Why it failed, as a sentence.
    error: str | None
    #: What is to be said wherever its work is shown, such as "preview (no diffusion model)".
    notice: str
    #: Its parameters: as used where a worker has filled them in, else as submitted.
    parameters: dict[str, Any]
    #: The queue it was put in, and when.
    queue: str
    created_at: datetime

    @property
    def ended(self) -> bool:
        """Whether it stays as it is."""
        return self.status in ENDED

    @property
    def name(self) -> str:
        """Its name, for people."""
        return str(self.parameters.get("name", "?"))

    def as_json(self) -> dict[str, Any]:
        """One flat JSON object: what is known of it, then every parameter."""
        own = asdict(self) | {"outputs": list(self.outputs), "created_at": self.created_at.isoformat()}
        del own["parameters"]
        return own | {name: value for name, value in self.parameters.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """One queue and how many jobs it has in each state."""

    #: Name of the queue.
    name: str
    #: Number of jobs by RQ's words for their state.
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker group, as RQ knows it."""

    #: Unique name.
    name: str
    #: RQ's words: idle, busy, suspended, …
    state: str
    #: Host and process of its rank 0.
    hostname: str
    pid: int
    #: Queues it takes jobs from.
    queues: list[str]
    #: Jobs it has ended.
    finished: int
    failed: int


def view(connection: redis.Redis, job_id: str) -> JobView:
    """Look at one job.

    Raises:
        InputError: there is no such job.
    """
    return _view(fetch(connection, job_id))


def view_many(connection: redis.Redis, job_ids: Iterable[str]) -> list[JobView]:
    """Look at several jobs at once; those that are not there are left out."""
    return [_view(job) for job in _fetch_many(connection, job_ids)]


def list_jobs(connection: redis.Redis, limit: int = 50, statuses: Sequence[str] = ()) -> list[JobView]:
    """Return the newest jobs of all queues, newest first; only those in `statuses` when any are given."""
    job_ids: dict[str, None] = {}
    for queue in queues(connection):
        for status, ids in _newest_ids(queue, limit).items():
            if not statuses or status in statuses:
                job_ids.update(dict.fromkeys(ids))
    newest = sorted(_fetch_many(connection, job_ids), key=_created_at, reverse=True)
    return [_view(job) for job in newest[:limit]]


def view_queues(connection: redis.Redis) -> list[QueueView]:
    """Count the jobs of every queue by state."""
    views = []
    for queue in queues(connection):
        waiting = queue.count + connection.llen(_between(queue).key)
        counts = {status: registry.get_job_count(cleanup=False) for status, registry in _registries(queue).items()}
        views.append(QueueView(name=queue.name, counts={"queued": waiting} | counts))
    return views


def view_workers(connection: redis.Redis) -> list[WorkerView]:
    """Return the worker groups that take jobs of ours, by name."""
    names = {queue.name for queue in queues(connection)}
    workers = rq.Worker.all(connection=connection, queue_class=SvdqQueue, serializer=JSONSerializer)
    return [
        WorkerView(
            name=worker.name,
            state=str(getattr(worker.get_state(), "value", worker.get_state())),
            hostname=worker.hostname or "?",
            pid=worker.pid or 0,
            queues=worker.queue_names(),
            finished=worker.successful_job_count or 0,
            failed=worker.failed_job_count or 0,
        )
        for worker in sorted(workers, key=lambda worker: str(worker.name))
        if names & set(worker.queue_names())
    ]


def last_sentence(exc_string: str | None) -> str:
    """Return the message on a traceback's last line, without the class in front of it."""
    lines = [line.strip() for line in (exc_string or "").splitlines() if line.strip()]
    return (
        _EXCEPTION_CLASS.sub("", lines[-1]) if lines else "It failed and no reason was recorded; see the worker's log."
    )


def _view(rq_job: rq.job.Job) -> JobView:
    job = read_job(rq_job)
    status = rq_job.get_status(refresh=False).value
    meta = rq_job.meta
    # Only an ended job has a result that counts: that of a job being tried again tells why it did not work before.
    result = Result.fetch_latest(rq_job, serializer=JSONSerializer) if status in ENDED else None
    value = result.return_value if result and isinstance(result.return_value, dict) else {}
    used = value.get("used") or meta.get("used") or {}
    parameters = (job.model_dump(mode="json") if job else {}) | used
    steps = int(parameters.get("steps", 0))
    error = None
    if status == JobStatus.FAILED.value:
        error = last_sentence(result.exc_string if result else None)
    elif job is None:
        error = "This is not a job of svdq's, or it was submitted by another version; submit its photo again."
    elif status == JobStatus.STOPPED.value:
        error = "It was stopped by the user; `svdq retry` queues it again."
    return JobView(
        id=rq_job.id,
        status=status,
        step=steps if status == JobStatus.FINISHED.value else int(meta.get("step", 0)),
        steps=steps,
        rank=meta.get("rank") if status == JobStatus.STARTED.value else None,
        outputs=tuple(value.get("outputs") or ()),
        error=error,
        notice=str(value.get("notice") or meta.get("notice") or ""),
        parameters=parameters,
        queue=rq_job.origin,
        created_at=_created_at(rq_job),
    )


def _fetch_many(connection: redis.Redis, job_ids: Iterable[str]) -> list[rq.job.Job]:
    """Fetch jobs in one round trip."""
    found = rq.job.Job.fetch_many(job_ids, connection=connection, serializer=JSONSerializer)
    return [job for job in found if job is not None]


def _created_at(rq_job: rq.job.Job) -> datetime:
    created_at = rq_job.created_at
    return created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC)


def _newest_ids(queue: SvdqQueue, limit: int) -> dict[str, list[str]]:
    """Return the newest ids of each state; registries are sorted by expiry, which for ended jobs follows their end."""
    waiting = queue.get_job_ids(offset=max(queue.count - limit, 0), length=limit) + _between(queue).get_job_ids()
    registries = _registries(queue)
    ids = {
        status: registry.get_job_ids(0, limit - 1, desc=True, cleanup=False) for status, registry in registries.items()
    }
    return {"queued": waiting} | ids


def _between(queue: SvdqQueue) -> IntermediateQueue:
    """Where RQ keeps a job between taking it off the queue and registering it as started."""
    return IntermediateQueue(queue.key, connection=queue.connection)


def _registries(queue: SvdqQueue) -> dict[str, Any]:
    return {
        "started": queue.started_job_registry,
        "scheduled": queue.scheduled_job_registry,
        "deferred": queue.deferred_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
        "canceled": queue.canceled_job_registry,
    }
