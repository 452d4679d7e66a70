"""Reads jobs from Redis, also for the Python API. One bad record does not affect the others."""

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import redis
from redis.client import Pipeline
from rq.job import JobStatus
from rq.results import Result

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.connection import session
from svdq.producer.queue import ENDED, SvdqQueue, fetch, read_arguments, statuses, unable_of
from svdq.producer.records import JobMeta, JobResult
from svdq.producer.settings import Settings
from svdq.producer.text import MAX_SECONDS, rfc3339
from svdq.producer.together import Read, ask_one, together
from svdq.producer.untrusted_job import AT_ONCE, UnreadableJobError, UntrustedJob, reading_many, reading_results

if TYPE_CHECKING:
    from svdq.producer.job import Job

POLL_S = 0.3
#: Pauses are at least this many times as long as a look: with thousands of jobs a look takes a while.
POLL_SHARE = 3
MAX_OUTAGE_S = 30.0
MAX_WAITING = 20  # waiting jobs that are read at a look; further ones are read when they have started
#: The exception class before the sentence on a traceback's last line, such as `svdq.pipeline.errors.SampleError: `.
_EXCEPTION_CLASS = re.compile(r"^(?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*|[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)): ")


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The present state of one job; None and "" mean that there is none, or none yet."""

    id: str
    status: str  # one of `keys.STATUSES`, or "unknown" if its record has none
    step: int = 0
    steps: int = 0
    computed: int | None = None  # how many of them are computed, where others are skipped; known in flight
    rank: int | None = None
    #: Rank r does the steps from boundaries[r] up to, not including, boundaries[r+1]: K+1 indices once it is planned.
    boundaries: tuple[int, ...] = ()
    decoder: int | None = None
    outputs: tuple[str, ...] = ()
    error: str | None = None  # why it failed, as a sentence
    #: Notice if no trained model made the video, such as "preview (no diffusion model)".
    notice: str = ""
    model: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # as used if recorded, else as submitted
    photo: str = ""
    source: str = ""  # where its photo was, from the submitted folder on, such as `holiday/day 1/cup.jpg`
    link: str = ""  # which link of a chain it is, such as `2 of 3`
    notes: dict[str, str] = field(default_factory=dict)
    owner: str = ""  # whose job it is; "" for jobs of earlier versions
    queue: str = ""
    waits_for: str = ""  # what a worker that took it has not, such as `an upscaler`, while it waits for another one
    created_at: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    started_at: datetime | None = None  # by its worker; None before that or if never
    ended_at: datetime | None = None
    worker: str | None = None  # name of the RQ worker that has or last had it
    scheduled_at: datetime | None = None
    after: tuple[str, ...] = ()  # ids of the jobs that it waits for, while it is deferred
    is_readable: bool = True  # its record in Redis; if not, `error` says why

    @property
    def ended(self) -> bool:
        """Whether it is in a final status."""
        return self.status in ENDED or not self.is_readable

    @property
    def name(self) -> str:
        """Its name for display."""
        return str(self.parameters.get("name", "?"))

    @property
    def progress(self) -> str:
        """The step that it is at, in words, and how many of its steps are computed if others are skipped."""
        computed = "" if self.computed is None else f" ({self.computed} computed)"
        return f"step {self.step} of {self.steps}{computed}"

    @property
    def prompt(self) -> str:
        """Its prompt; "" if it has none."""
        prompt = self.parameters.get("prompt")
        return prompt if isinstance(prompt, str) else ""

    @property
    def duration_s(self) -> float | None:
        """Seconds from its start on a worker to its end; None before the end."""
        if self.started_at is None or self.ended_at is None:
            return None
        return max(0.0, (self.ended_at - self.started_at).total_seconds())

    def as_json(self) -> dict[str, Any]:
        """Return one flat JSON object: its own fields, then every parameter."""
        own = asdict(self) | {"outputs": list(self.outputs), "after": list(self.after)}
        for name in ("created_at", "started_at", "ended_at", "scheduled_at"):
            own[name] = rfc3339(own[name]) if own[name] else None
        own["duration_s"] = None if self.duration_s is None else round(self.duration_s, 3)
        del own["parameters"], own["notes"], own["is_readable"], own["boundaries"], own["decoder"]
        return own | {name: value for name, value in self.parameters.items() if name not in own}


def view(connection: redis.Redis, job_id: str) -> JobView:
    """Read one job; raises InputError if it does not exist."""
    views = view_many(connection, [job_id])
    if not views:
        fetch(connection, job_id)  # raises
    return views[0]


def view_many(connection: redis.Redis, job_ids: Iterable[str]) -> list[JobView]:
    """Read several jobs at once; missing ones are left out."""
    remaining, views = iter(job_ids), []
    while chunk := list(islice(remaining, AT_ONCE)):
        views += ask_one(connection, read_views(connection, chunk))
    return views


def read_views(connection: redis.Redis, job_ids: Collection[str]) -> Read[list[JobView]]:
    """Read the same; two round trips, or one if none has ended or waits outside of the queues."""
    records = yield from reading_many(connection, job_ids)
    found = [record for record in records if record is not None]
    rq_jobs = [record for record in found if isinstance(record, UntrustedJob)]
    ended = [job for job in rq_jobs if job.get_status(refresh=False).value in ENDED]  # others may have an older result
    reads = (reading_results(ended), _read_waits(connection, rq_jobs))
    results_of, waits = yield from together(*reads)
    results = {job.id: result for job, result in zip(ended, results_of, strict=True)}
    views = []
    for record in found:
        if isinstance(record, UntrustedJob):
            try:
                result = results.get(record.id)
                if isinstance(result, UnreadableJobError):
                    raise result
                views.append(_view(record, result, waits.get(record.id, {})))
                continue
            except UnreadableJobError as error:
                record = error
            except Exception as error:  # noqa: BLE001 - anyone can write to Redis; other jobs are shown all the same
                record = UnreadableJobError(record.id, record.get_status(refresh=False).value.encode(), error)
        views.append(JobView(id=record.job_id, status=record.status, error=str(record), is_readable=False))
    return views


def last_sentence(exc_string: str | None) -> str:
    """Return the message on a traceback's last line, without its exception class."""
    lines = [line.strip() for line in (exc_string or "").splitlines() if line.strip()]
    return (
        _EXCEPTION_CLASS.sub("", lines[-1]) if lines else "It failed and no reason was recorded; see the worker's log."
    )


def _view(rq_job: UntrustedJob, result: Result | None, wait: Mapping[str, Any]) -> JobView:
    arguments = read_arguments(rq_job)
    status = rq_job.get_status(refresh=False).value
    if status == JobStatus.READY_TO_ENQUEUE.value:
        status = JobStatus.DEFERRED.value  # for the moment until it is queued
    meta = JobMeta.model_validate(rq_job.meta)
    made = JobResult.model_validate((result and result.return_value) or {}) if arguments else JobResult()
    parameters = _parameters(arguments.job, made.used or meta.used) if arguments else {}
    steps = int(parameters.get("steps") or 0)
    error = None
    if status == JobStatus.FAILED.value:
        error = last_sentence(result.exc_string if result else None)
    elif arguments is None:
        error = "This is not a job of svdq, or another version submitted it; submit its photo again."
    elif status == JobStatus.STOPPED.value:
        error = "The user stopped it; `svdq retry` queues it again."
    elif status == JobStatus.CANCELED.value:
        error = meta.canceled or None
    is_left = status == JobStatus.QUEUED.value and unable_of(rq_job.origin)
    if is_left and arguments is None:
        error = None  # a newer version reads it
    return JobView(
        id=rq_job.id,
        status=status,
        step=steps if status == JobStatus.FINISHED.value else meta.step,
        steps=steps,
        computed=meta.computed,
        rank=meta.rank if status == JobStatus.STARTED.value else None,
        boundaries=meta.boundaries,
        decoder=meta.decoder,
        outputs=made.outputs,
        error=error,
        notice=made.notice or meta.notice,
        model=made.model or str(parameters.get("model") or ""),
        parameters=parameters,
        photo=arguments.photo if arguments else "",
        source=arguments.source if arguments else "",
        link=arguments.link if arguments else "",
        notes=arguments.own_notes if arguments else {},
        owner=rq_job.owner,
        queue=rq_job.origin,
        waits_for=rq_job.waits_for if is_left else "",
        created_at=rq_job.created_at,
        started_at=rq_job.started_at,
        ended_at=rq_job.ended_at,
        worker=rq_job.worker_name,
        **wait,
    )


def _parameters(job: "Job", used: dict[str, Any]) -> dict[str, Any]:
    from svdq.producer.job import parse_job  # imported already by who has a job

    submitted = job.model_dump(mode="json")
    try:
        return parse_job(submitted | used).model_dump(mode="json") if used else submitted
    except ValueError:
        return submitted


def _read_waits(connection: redis.Redis, rq_jobs: Sequence[UntrustedJob]) -> Read[dict[str, dict[str, Any]]]:
    """Read what jobs outside of the queues wait for: the fields `scheduled_at` or `after` of their views, by job id."""
    asked = []

    def put(pipeline: Pipeline) -> None:
        for job in rq_jobs:
            status = job.get_status(refresh=False)
            if status is JobStatus.SCHEDULED:
                pipeline.zscore(SvdqQueue(job.origin, connection=connection).scheduled_job_registry.key, job.id)
                asked.append(job.id)
            elif status is JobStatus.DEFERRED:
                pipeline.smembers(job.dependencies_key)
                asked.append(job.id)

    answers = yield put
    waits: dict[str, dict[str, Any]] = {}
    for job_id, answer in zip(asked, answers, strict=True):
        if isinstance(answer, float) and 0 <= answer < MAX_SECONDS:
            waits[job_id] = {"scheduled_at": datetime.fromtimestamp(answer, UTC)}
        elif isinstance(answer, set):
            waits[job_id] = {"after": tuple(sorted(member.decode(errors="backslashreplace") for member in answer))}
    return waits


def job_status(settings: Settings, job_id: str) -> JobView:
    """Connect and read one job; raises InputError if it does not exist, UnavailableError without Redis."""
    with session(settings) as connection:
        return view(connection, job_id)


def cancel(settings: Settings, job_ids: str | Iterable[str]) -> list[JobView]:
    """Cancel jobs, all or none, and return them; raises InputError if one does not exist or has ended."""
    return _change(settings, job_ids, "cancel", job_control.cancel_many)


def retry(settings: Settings, job_ids: str | Iterable[str]) -> list[JobView]:
    """Queue failed, stopped and canceled jobs again, all or none, with the same ids and seeds; return them."""
    return _change(settings, job_ids, "retry", job_control.retry_many)


def _change(
    settings: Settings,
    job_ids: str | Iterable[str],
    action: job_control.Action,
    act: Callable[[redis.Redis, list[str]], Iterable[tuple[str, object]]],
) -> list[JobView]:
    ids = [job_ids] if isinstance(job_ids, str) else list(dict.fromkeys(job_ids))
    with session(settings) as connection:
        job_control.check(connection, action, ids)
        for _, outcome in act(connection, ids):
            if isinstance(outcome, InputError):
                raise outcome
        return view_many(connection, ids)


class JobsLostError(InputError):
    """Redis has not, or not any more, all jobs that were waited for."""

    def __init__(self, job_ids: Sequence[str], others: list[JobView]) -> None:
        self.others = others  # the other jobs
        (first, *more) = job_ids
        gone = f"{len(job_ids):,} of these jobs are gone, such as" if more else "There is no job"
        super().__init__(
            f"{gone} {first!r}: removed, or lost with the last changes of a Redis server that was replaced; "
            "submit the photo again."
        )


def wait_for_jobs(
    settings: Settings,
    job_ids: str | Iterable[str],
    *,
    timeout_s: float | None = None,
    on_look: Callable[[redis.Redis, list[JobView]], object] = lambda connection, views: None,
    on_outage: Callable[[], object] = lambda: None,
) -> list[JobView]:
    """Wait until all jobs have ended, also through a restart of Redis; return them in the given order.

    `job_ids` are full ids. After `timeout_s` seconds the jobs are returned as they are. `on_look` is called at each
    look with the jobs that had not ended before, without most of those that wait, and `on_outage` once when Redis does
    not answer. Raises a JobsLostError at the end if Redis has not all jobs, and UnavailableError if Redis cannot be
    reached for MAX_OUTAGE_S.
    """
    job_ids = [job_ids] if isinstance(job_ids, str) else list(dict.fromkeys(job_ids))
    answered = time.monotonic()
    deadline = answered + (math.inf if timeout_s is None else timeout_s)
    ended: dict[str, JobView] = {}
    lost: dict[str, None] = {}
    is_away = False
    with session(settings) as connection:
        while True:
            begin = time.monotonic()
            try:
                pending = [job_id for job_id in job_ids if job_id not in ended | lost]
                states = zip(pending, statuses(connection, pending), strict=True)
                waiting = [job_id for job_id, status in states if status not in (*ENDED, "started", None)]
                unseen = set() if begin >= deadline else set(waiting[MAX_WAITING:])  # there may be ten thousand
                seen = [job_id for job_id in pending if job_id not in unseen]
                views = {view.id: view for view in view_many(connection, seen)}
                lost |= dict.fromkeys(job_id for job_id in seen if job_id not in views)
                on_look(connection, list(views.values()))
                ended |= {view.id: view for view in views.values() if view.ended}
                if begin >= deadline or len(ended) + len(lost) == len(job_ids):
                    found = ended | views
                    others = [found[job_id] for job_id in job_ids if job_id in found]
                    if lost:
                        raise JobsLostError([*lost], others)
                    return others
                answered, is_away = time.monotonic(), False
            except (redis.ConnectionError, redis.TimeoutError):
                if not is_away:
                    on_outage()
                is_away = True
                if time.monotonic() >= min(deadline, answered + MAX_OUTAGE_S):
                    raise
            rest_s = max(POLL_S, POLL_SHARE * (time.monotonic() - begin))
            time.sleep(max(0.0, min(rest_s, deadline - time.monotonic())))
