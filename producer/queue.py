"""The connection to Redis and the RQ queues: how a job gets in and is found again. Knows no photos and no storage."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import redis
import rq
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError
from redis.retry import Retry
from rq.exceptions import NoSuchJobError
from rq.job import Dependency, JobStatus
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, reason_of
from svdq.producer import keys
from svdq.producer.embedded_redis.server import ensure_server
from svdq.producer.job import Job
from svdq.producer.records import key_of
from svdq.producer.redis_url import check_url
from svdq.producer.settings import Settings, without_secrets
from svdq.producer.untrusted_job import UnreadableJobError, UntrustedJob

Priority = Literal["high", "default", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)

#: The only function that jobs of ours name. It exists so that RQ's tools can show it; our worker never calls it.
RENDER = "svdq.producer.queue.render"

#: Seconds to wait for a connection and for an answer: a person is waiting.
CONNECT_TIMEOUT_S = 3.0
#: Seconds for which a server that refuses connections, or still loads its data, is asked again, and between two asks.
RESTART_S = 2.0
RETRY_S = 0.2
ANSWER_TIMEOUT_S = 4.5


class SvdqQueue(rq.Queue):
    """An RQ queue that reads and writes JSON unless told otherwise, so that RQ's tools never unpickle our jobs.

    For `rq info --queue-class svdq.producer.queue.SvdqQueue`: the plain class rewrites what it finds as pickle.
    """

    job_class = UntrustedJob

    def __init__(self, name: str = "svdq-default", connection: redis.Redis | None = None, **options: Any) -> None:
        options["serializer"] = options.get("serializer") or JSONSerializer
        super().__init__(name, connection, **options)


def render(**parameters: Any) -> None:
    """Refuse to render: this is what a stock RQ worker finds when it takes a job of ours."""
    raise SvdqError("Only svdq's own worker renders videos; start one with `svdq worker`.")


def queues(connection: redis.Redis) -> list[SvdqQueue]:
    """All our queues, most urgent first."""
    return [SvdqQueue(name, connection=connection) for name in keys.QUEUE_NAMES]


def server_url(settings: Settings) -> str:
    """Return the URL of the Redis server; the embedded one is started when none is set."""
    return settings.redis_url or ensure_server(settings.home)


def connect(settings: Settings) -> redis.Redis:
    """Connect for a person who waits: within about five seconds there is a connection or an error.

    Raises:
        UnavailableError: the server cannot be reached.
        InputError: the URL is not one.
    """
    url = server_url(settings)
    check_url(url)
    # redis-py's own ten retries keep a person waiting for a minute; who can wait, such as `svdq wait`, asks again.
    retry = Retry(NoBackoff(), 0)
    connection = redis.Redis.from_url(
        url, retry=retry, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=ANSWER_TIMEOUT_S
    )
    with plain_errors(settings):
        try:
            _wait_for_answer(connection)
        except RedisError:
            connection.close()
            raise
    return connection


def _wait_for_answer(connection: redis.Redis) -> None:
    """Ask until there is an answer, for the few seconds that a server takes to start again; nothing is sent before."""
    give_up_at = time.monotonic() + RESTART_S
    while True:
        try:
            connection.ping()
            return
        except redis.AuthenticationError:
            raise
        except redis.ConnectionError:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(RETRY_S)


@contextlib.contextmanager
def plain_errors(settings: Settings) -> Iterator[None]:
    """Turn every error of redis-py in the block into an UnavailableError that names the server."""
    try:
        yield
    except RedisError as error:
        where = without_secrets(settings.redis_url) if settings.redis_url else "embedded in " + str(settings.home)
        raise UnavailableError(f"The Redis server {where} {_complaint(error)}") from error


def _complaint(error: RedisError) -> str:
    """Say what a server did not do and what helps; servers never repeat passwords in what they answer."""
    reason = reason_of(error)
    if "HELLO must be called" in reason or "Authentication required" in reason:
        return "needs a password; set SVDQ_REDIS_URL with it, such as redis://:PASSWORD@host:6379/0."
    if isinstance(error, redis.AuthenticationError):
        return "refuses the user or the password; correct them in SVDQ_REDIS_URL."
    if isinstance(error, NoPermissionError) or "NOPERM" in reason:
        return f"does not allow its user to do this ({reason}); give that user the rights listed in docs/redis.md."
    return f"cannot be used ({reason}); check that it runs and that SVDQ_REDIS_URL or --redis-url is right."


@contextlib.contextmanager
def session(settings: Settings) -> Iterator[redis.Redis]:
    """Connect for the length of a block, with plain errors, and close."""
    connection = connect(settings)
    try:
        with plain_errors(settings):
            yield connection
    finally:
        connection.close()


def queue_of(connection: redis.Redis, priority: str) -> SvdqQueue:
    """Give the queue of a priority."""
    return SvdqQueue(f"svdq-{priority}", connection=connection)


def new_rq_job(
    queue: SvdqQueue, job: Job, job_id: str, *, photo: str = "", is_scheduled: bool = False, after: Sequence[str] = ()
) -> rq.job.Job:
    """Make the RQ job of a job; nothing is written.

    Args:
        queue: where it is to go.
        job: what is to be made.
        job_id: its id.
        photo: the path of its photo, for people; a worker never looks there.
        is_scheduled: whether it waits for a set time.
        after: ids of jobs that are to have finished or failed first.
    """
    return queue.create_job(
        RENDER,
        kwargs={"job": job.model_dump(mode="json"), **({"photo": photo} if photo else {})},
        job_id=job_id,
        status=JobStatus.SCHEDULED if is_scheduled else JobStatus.QUEUED,
        depends_on=Dependency(jobs=list(after), allow_failure=True) if after else None,
        timeout=keys.JOB_TIMEOUT_S,
        retry=rq.Retry(max=keys.MAX_RETRIES),
        result_ttl=keys.RESULT_TTL_S,
        failure_ttl=keys.FAILURE_TTL_S,
        description=f"svdq {job.name} {job.width}x{job.height}",
    )


def fetch(connection: redis.Redis, job_id: str) -> rq.job.Job:
    """Find a job by its id.

    Raises:
        InputError: there is no such job, or its record cannot be read.
    """
    try:
        return UntrustedJob.fetch(job_id, connection=connection, serializer=JSONSerializer)
    except UnreadableJobError as error:
        raise InputError(
            f"{error} Another program has written it; `redis-cli -u $(svdq redis url) del rq:job:{job_id}` removes it."
        ) from error
    except (NoSuchJobError, ValueError) as error:  # ValueError: not even the shape of an id
        raise not_there(job_id) from error


def not_there(job_id: str) -> InputError:
    """Make the error for a job that is not there."""
    days = keys.RESULT_TTL_S // keys.DAY_S
    return InputError(
        f"There is no job {job_id!r}; `svdq list` shows the jobs there are (finished ones for {days} days)."
    )


def statuses(connection: redis.Redis, job_ids: Sequence[str]) -> list[str | None]:
    """Look up how jobs stand, in RQ's words, and nothing else of them; None where there is no such job.

    A record that cannot be read whole has a state all the same.
    """
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(key_of(job_id), "status")
        found = pipeline.execute(raise_on_error=False)
    for error in found:
        if isinstance(error, RedisError) and not str(error).startswith("WRONGTYPE"):
            raise error
    return [status.decode(errors="replace") if isinstance(status, bytes) else None for status in found]


def read_job(rq_job: rq.job.Job) -> Job | None:
    """Read the job of ours in an RQ job, or None when it is something else; nothing is imported or called."""
    try:
        return Job.model_validate(rq_job.kwargs["job"]) if rq_job.func_name == RENDER else None
    except Exception:  # noqa: BLE001 - anyone can write to Redis; whatever is wrong, it is not ours
        return None


def photo_of(rq_job: rq.job.Job) -> str:
    """Give the path of the photo that a job was submitted with, or ""."""
    photo = rq_job.kwargs.get("photo", "")
    return photo if isinstance(photo, str) else ""
