"""Reads RQ jobs that anyone with access to Redis may have written: as JSON, and nothing in them is called.

Touches RQ's internals; `tests/worker/test_group_worker.py` fails when a new RQ changes them.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import redis
import rq
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.client import Pipeline
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import JobStatus, validate_job_id
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.pipeline.errors import reason_of
from svdq.producer import keys
from svdq.producer.records import Count, JobMeta, Time, reason_invalid
from svdq.producer.together import Read, ask_one

AT_ONCE: Final = 500
_STATUSES = frozenset(status.value for status in JobStatus)


class _Values(BaseModel):
    """The attributes of a job that would fail later, when the job ends, if they were not of these types."""

    model_config = ConfigDict(from_attributes=True, defer_build=True, strict=True, arbitrary_types_allowed=True)

    created_at: Time
    enqueued_at: Time | None
    started_at: Time | None
    ended_at: Time | None
    last_heartbeat: Time | None
    ttl: int | None = Field(ge=-1, lt=2**32)  # Redis refuses times that do not fit into 64 bits
    result_ttl: int | None = Field(ge=-1, lt=2**32)
    failure_ttl: int | None = Field(ge=-1, lt=2**32)
    retry_intervals: list[Count] | None
    dependency_ids: list[str] = Field(validation_alias="_dependency_ids")


class UnreadableJobError(NoSuchJobError):
    """The value under a job's key is not a record that RQ could have written; the message gives the reason."""

    def __init__(self, job_id: str, status: bytes | None, reason: Exception) -> None:
        text = reason_invalid(reason) if isinstance(reason, ValidationError) else reason_of(reason)
        super().__init__(f"The record of job {job_id!r} cannot be read: {text[:200]}.")
        self.job_id = job_id
        written = (status or b"").decode(errors="replace")
        #: RQ's status where the record has one, else "unknown".
        self.status = written if written in _STATUSES else "unknown"


class UntrustedJob(rq.job.Job):
    """An RQ job that calls nothing that its record names; RQ's own code uses it through `SvdqQueue`."""

    owner = ""  # whose job it is; "" for jobs of plain RQ and of earlier versions
    waits_for = ""  # what the group had not that took it last, in a queue that such groups leave to others

    def restore(self, raw_data: Any) -> None:
        """Take the fields of the job's record; raises UnreadableJobError if it is malformed."""
        try:
            super().restore(raw_data)
            # What RQ's tools have written as pickle is not JSON, and must not keep the job from being written again.
            if not isinstance(self.meta, dict) or "unserialized" in self.meta:
                self.meta = {}
            self.group_id = None  # svdq has no groups, and RQ fails to delete a job whose group is gone
            self.owner = raw_data.get(keys.OWNER_FIELD.encode(), b"").decode(errors="replace")
            self.waits_for = raw_data.get(keys.WAITS_FIELD.encode(), b"").decode(errors="replace")
            JobMeta.model_validate(self.meta)
            _Values.model_validate(self)
        except Exception as error:
            reason = error if b"data" in raw_data else ValueError("it has no data")
            raise UnreadableJobError(self.id, raw_data.get(b"status"), reason) from error

    def _fetch_status(self) -> JobStatus:
        """Return the status; `created` where the record has none, as RQ does when it reads the whole of it."""
        try:
            return super()._fetch_status()
        except InvalidJobOperation:
            if not self.connection.exists(self.key):
                raise
            return JobStatus.CREATED

    def to_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the fields of the job's record, its owner among them."""
        record: dict[str, Any] = super().to_dict(*arguments, **options)
        return record | ({keys.OWNER_FIELD: self.owner} if self.owner else {})

    @classmethod
    def find(cls, job_id: bytes | str, connection: redis.Redis) -> "UntrustedJob | None":
        """Read a job; None when there is none of that id that can be read."""
        return cls.fetch_many([job_id], connection)[0]

    @classmethod
    def fetch_many(  # type: ignore[override]  # takes bytes, too
        cls, job_ids: Iterable[str | bytes], connection: redis.Redis, serializer: Any = None
    ) -> list["UntrustedJob | None"]:
        """Read several jobs; None for each that cannot be read."""
        return [found if isinstance(found, cls) else None for found in read_many(connection, job_ids)]

    def latest_result(self, timeout: int = 0) -> Result | None:
        """Read the newest result; None when there is none that can be read. Does not wait."""
        (found,) = read_results(self.connection, [self])
        return found if isinstance(found, Result) else None

    def dependencies_are_met(
        self, parent_job: rq.job.Job | None = None, pipeline: Pipeline | None = None, *arguments: Any, **options: Any
    ) -> bool:
        """Return whether a job that waits for others may be queued; never if something that it names is not a job."""
        try:
            # The end of a parent queues only what still waits: a user may have queued or canceled it before.
            if parent_job is not None:
                if pipeline is not None:
                    pipeline.watch(self.key)  # type: ignore[no-untyped-call]
                if self.get_status() is not JobStatus.DEFERRED:
                    return False
            return super().dependencies_are_met(parent_job, pipeline, *arguments, **options)
        except (ValueError, InvalidJobOperation, redis.ResponseError):
            return False

    @property
    def failure_callback(self) -> None:
        """None, so that RQ's clean-up imports and calls nothing."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


def key_of(job_id: bytes | str) -> bytes:
    """Return the Redis key of a job's record; any id is allowed."""
    name = job_id if isinstance(job_id, bytes) else job_id.encode(errors="replace")
    return rq.job.Job.redis_job_namespace_prefix.encode() + name


def read_many(
    connection: redis.Redis, job_ids: Iterable[bytes | str]
) -> Iterator[UntrustedJob | UnreadableJobError | None]:
    """Read jobs in their order, or why one cannot be read; None for missing ones. One bad record harms no other."""
    remaining = iter(job_ids)
    while chunk := list(islice(remaining, AT_ONCE)):
        yield from ask_one(connection, reading_many(connection, chunk))


def reading_many(
    connection: redis.Redis, job_ids: Collection[bytes | str]
) -> Read[list[UntrustedJob | UnreadableJobError | None]]:
    """Read the same at once."""
    answers = yield lambda pipeline: [pipeline.hgetall(key_of(job_id)) for job_id in job_ids]
    found = zip(job_ids, answers, strict=True)
    return [restored(connection, job_id, answer) if answer else None for job_id, answer in found]


def restored(connection: redis.Redis, job_id: bytes | str, answer: Any) -> UntrustedJob | UnreadableJobError:
    """Make a job of its record, as Redis answered; or say why that cannot be read."""
    name = job_id if isinstance(job_id, str) else job_id.decode(errors="backslashreplace")
    try:
        if isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE"):
            raise ValueError("its key holds something else")
        if isinstance(answer, Exception):
            raise answer
        validate_job_id(name)
        job = UntrustedJob(name, connection=connection, serializer=JSONSerializer)
        job.restore(answer)
    except UnreadableJobError as error:
        return error
    except ValueError as error:
        return UnreadableJobError(name, None, error)
    return job


def read_results(connection: redis.Redis, jobs: Collection[rq.job.Job]) -> list[Result | UnreadableJobError | None]:
    """Read the newest result of each job in one round trip, or why it cannot be read; None without one."""
    return ask_one(connection, reading_results(jobs))


def reading_results(jobs: Collection[rq.job.Job]) -> Read[list[Result | UnreadableJobError | None]]:
    """Read the same."""

    def put(pipeline: Pipeline) -> None:
        for job in jobs:
            pipeline.xrevrange(Result.get_key(job.id), count=1)  # type: ignore[no-untyped-call]

    answers = yield put
    results: list[Result | UnreadableJobError | None] = []
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, redis.ConnectionError | redis.TimeoutError):
            raise answer
        try:
            results.append(_restored_result(job, answer) if answer else None)
        except Exception as error:  # noqa: BLE001 - anyone can write to Redis; other jobs continue
            results.append(UnreadableJobError(job.id, job.get_status(refresh=False).value.encode(), error))
    return results


def _restored_result(job: rq.job.Job, answer: Any) -> Result:
    if isinstance(answer, Exception):
        raise answer  # the key is no stream
    ((result_id, payload),) = answer
    return Result.restore(job.id, as_text(result_id), payload, connection=job.connection, serializer=job.serializer)
