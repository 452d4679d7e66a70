"""What is known of jobs and queues. Knows no terminal.

Reads only: RQ's clean-up is never run here, for it may call functions that whoever writes to Redis has chosen.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import redis
import rq
from rq.job import JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.producer.moments import as_utc
from svdq.producer.queue import SvdqQueue, fetch, read_job
from svdq.producer.status.registries import counts, newest_ids

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
    #: Name of the model that made it, once it is finished; "" when that is not known.
    model: str
    #: Its parameters: as used where a worker has filled them in, else as submitted.
    parameters: dict[str, Any]
    #: The queue it was put in, and when.
    queue: str
    created_at: datetime
    #: When it is to be queued, while it is scheduled.
    scheduled_at: datetime | None
    #: Ids of the jobs that it waits for, while it is deferred.
    after: tuple[str, ...]

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
        scheduled_at = self.scheduled_at.isoformat() if self.scheduled_at else None
        own = asdict(self) | {"outputs": list(self.outputs), "created_at": self.created_at.isoformat()}
        own |= {"scheduled_at": scheduled_at, "after": list(self.after)}
        del own["parameters"]
        return own | {name: value for name, value in self.parameters.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """One queue and how many jobs it has in each state."""

    #: Name of the queue.
    name: str
    #: Number of jobs by RQ's words for their state.
    counts: dict[str, int]


def view(connection: redis.Redis, job_id: str) -> JobView:
    """Look at one job.

    Raises:
        InputError: there is no such job.
    """
    rq_job = fetch(connection, job_id)
    return _view(rq_job, _results(connection, [rq_job])[0], _waits(connection, [rq_job])[0])


def view_many(connection: redis.Redis, job_ids: Iterable[str]) -> list[JobView]:
    """Look at several jobs at once, in three round trips; those that are not there are left out."""
    found = rq.job.Job.fetch_many(job_ids, connection=connection, serializer=JSONSerializer)
    rq_jobs = [job for job in found if job is not None]
    return list(map(_view, rq_jobs, _results(connection, rq_jobs), _waits(connection, rq_jobs)))


def list_jobs(
    connection: redis.Redis, limit: int = 50, statuses: Sequence[str] = (), *, skip: int = 0
) -> list[JobView]:
    """Return the newest jobs of all queues, newest first.

    Args:
        connection: to Redis.
        limit: number of jobs at most.
        statuses: only jobs in these states; all when there are none.
        skip: number of newer jobs to leave out: the pages before this one.
    """
    job_ids = newest_ids(connection, skip + limit, statuses)
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(rq.job.Job.key_for(job_id), "created_at")
        created = pipeline.execute(raise_on_error=False)  # RQ writes times so that they sort as text
    known = [(moment, job_id) for moment, job_id in zip(created, job_ids, strict=True) if isinstance(moment, bytes)]
    page = sorted(known, reverse=True)[skip : skip + limit]
    return view_many(connection, [job_id for _, job_id in page])


def view_queues(connection: redis.Redis) -> list[QueueView]:
    """Count the jobs of every queue by state."""
    return [QueueView(name=name, counts=of_queue) for name, of_queue in counts(connection).items()]


def last_sentence(exc_string: str | None) -> str:
    """Return the message on a traceback's last line, without the class in front of it."""
    lines = [line.strip() for line in (exc_string or "").splitlines() if line.strip()]
    return (
        _EXCEPTION_CLASS.sub("", lines[-1]) if lines else "It failed and no reason was recorded; see the worker's log."
    )


def _view(rq_job: rq.job.Job, result: Result | None, wait: "_Wait") -> JobView:
    job = read_job(rq_job)
    status = rq_job.get_status(refresh=False).value
    meta = rq_job.meta
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
        model=str(value.get("model") or ""),
        parameters=parameters,
        queue=rq_job.origin,
        created_at=as_utc(rq_job.created_at),
        scheduled_at=wait.until,
        after=wait.after,
    )


def _results(connection: redis.Redis, rq_jobs: Sequence[rq.job.Job]) -> list[Result | None]:
    """Read the latest result of each job that has ended.

    Only an ended job has one that counts: that of a job being tried again tells why it did not work before.
    """
    ended = [job for job in rq_jobs if job.get_status(refresh=False).value in ENDED]
    with connection.pipeline(transaction=False) as pipeline:
        for job in ended:
            pipeline.xrevrange(Result.get_key(job.id), count=1)  # type: ignore[no-untyped-call]
        answers = pipeline.execute()
    results = {}
    for job, entries in zip(ended, answers, strict=True):
        for result_id, payload in entries:
            results[job.id] = Result.restore(
                job.id, result_id.decode(), payload, connection=connection, serializer=JSONSerializer
            )
    return [results.get(job.id) for job in rq_jobs]


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """What a job waits for that is in no queue."""

    until: datetime | None = None
    after: tuple[str, ...] = ()


def _waits(connection: redis.Redis, rq_jobs: Sequence[rq.job.Job]) -> list[_Wait]:
    """Look up what each job waits for."""
    statuses = [job.get_status(refresh=False) for job in rq_jobs]
    with connection.pipeline(transaction=False) as pipeline:
        for job, status in zip(rq_jobs, statuses, strict=True):
            if status is JobStatus.SCHEDULED:
                pipeline.zscore(SvdqQueue(job.origin, connection=connection).scheduled_job_registry.key, job.id)
            elif status is JobStatus.DEFERRED:
                pipeline.smembers(job.dependencies_key)
        answers = iter(pipeline.execute())
    waits = []
    for status in statuses:
        answer = next(answers) if status in (JobStatus.SCHEDULED, JobStatus.DEFERRED) else None
        if isinstance(answer, float):
            waits.append(_Wait(until=datetime.fromtimestamp(answer, UTC)))
        else:
            waits.append(_Wait(after=tuple(sorted(map(as_text, answer or ())))))
    return waits
