"""The RQ queues of svdq, and the jobs in them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import redis
import rq
from redis.exceptions import RedisError
from rq.registry import ReadyJobRegistry
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import InputError, SvdqError
from svdq.producer import keys, lua
from svdq.producer.untrusted_job import UnreadableJobError, UntrustedJob, key_of, read_many

if TYPE_CHECKING:
    from svdq.producer.job import Job, JobArguments

#: The function named by our jobs. It exists so that RQ's tools can show it; our worker never calls it.
RENDER = "svdq.producer.queue.render"

End = Literal["finished", "failed", "stopped", "canceled"]  # stopped means that the user canceled the job in flight
ENDED: tuple[End, ...] = get_args(End)


class SvdqQueue(rq.Queue):
    """An RQ queue in JSON, which RQ's tools do not unpickle: `rq info --queue-class svdq.producer.queue.SvdqQueue`."""

    job_class = UntrustedJob

    @property
    def model(self) -> str:
        """The model that alone makes its videos; "" for the queues of all models."""
        return self.name.partition(":")[2].partition("/")[0]

    @property
    def unable(self) -> frozenset[str]:
        """The abilities of groups that cannot make its jobs, which the other groups make; none for most queues."""
        return unable_of(self.name)

    def __init__(self, name: str = "svdq-default", connection: redis.Redis | None = None, **options: Any) -> None:
        options["serializer"] = options.get("serializer") or JSONSerializer
        super().__init__(name, connection, **options)

    def push_job_id(self, job_id: str, pipeline: redis.client.Pipeline | None = None, at_front: bool = False) -> None:
        """Add a job to the queue where its owner's turn is, or at the front; also for RQ's own code."""
        if at_front:
            super().push_job_id(job_id, pipeline, at_front)
        else:
            lua.run(self.connection if pipeline is None else pipeline, "place", [self.key], "push", job_id)

    @property
    def ready_job_registry(self) -> ReadyJobRegistry:
        """The jobs whose dependencies are met and that RQ is about to queue."""
        return _ReadyJobs(queue=self, job_class=self.job_class, serializer=self.serializer)

    def take_turns(self, job_ids: Sequence[str]) -> None:
        """Move jobs that were added to the end of the queue to the turns of their owners."""
        lua.run(self.connection, "place", [self.key], "", *job_ids)


class _ReadyJobs(ReadyJobRegistry):
    def enqueue_jobs(self, job_ids: list[str]) -> list[rq.job.Job]:
        """Queue jobs as RQ does, then move those of svdq to the turns of their owners."""
        enqueued: list[rq.job.Job] = super().enqueue_jobs(job_ids)
        if is_queue(self.name) and (behind := [job.id for job in enqueued if not job.should_enqueue_at_front()]):
            SvdqQueue(self.name, connection=self.connection).take_turns(behind)
        return enqueued


def render(**parameters: Any) -> None:
    """Refuse to render: a stock RQ worker that takes our job calls this function."""
    raise SvdqError("Only svdq's own worker renders videos; start one with `svdq worker`.")


def queues(connection: redis.Redis) -> list[SvdqQueue]:
    """Return all our queues, most urgent first; of a priority, the general one last."""
    return queues_of(connection, connection.smembers(SvdqQueue.redis_queues_keys))


def queues_of(connection: redis.Redis, found: Any) -> list[SvdqQueue]:
    """Return all our queues, in the same order, by the members of RQ's set of queues."""
    names = (key.decode(errors="replace").removeprefix(SvdqQueue.redis_queue_namespace_prefix) for key in found)
    known = {*keys.QUEUE_NAMES, *filter(is_queue, names)}
    found = [SvdqQueue(name, connection=connection) for name in known]

    def place(queue: SvdqQueue) -> tuple[object, ...]:
        return keys.PRIORITIES.index(priority_of(queue.name)), -len(queue.unable), ":" not in queue.name, queue.name

    return sorted(found, key=place)


def is_queue(name: str) -> bool:
    """Return whether a queue of RQ is one of ours."""
    return name.partition(":")[0] in keys.QUEUE_NAMES


def unable_of(name: str) -> frozenset[str]:
    """Return the abilities of the groups that leave the jobs of a queue to others."""
    return frozenset(filter(None, name.partition(":")[2].partition("/")[2].split(".")))


def check_priority(priority: object) -> None:
    """Raise an InputError for a value that is not a priority."""
    if priority not in keys.PRIORITIES:
        raise InputError(
            f"There is no priority {priority!r}; choose one of {', '.join(keys.PRIORITIES)}.", field="priority"
        )


def priority_of(name: str) -> str:
    """Return the priority of the jobs of a queue."""
    return name.partition(":")[0].removeprefix("svdq-")


def queue_of(connection: redis.Redis, priority: str, model: str | None = None, unable: Iterable[str] = ()) -> SvdqQueue:
    """Return the queue of a priority: for all jobs, for jobs of one model, or for jobs that some groups cannot make."""
    without = ".".join(sorted(unable))
    wanted = f"{model or ''}/{without}" if without else model
    return SvdqQueue(f"svdq-{priority}:{wanted}" if wanted else f"svdq-{priority}", connection=connection)


def queues_for(connection: redis.Redis, model: str | None) -> list[SvdqQueue]:
    """Return the queues from which groups with a model take jobs first, most urgent first."""
    names = dict.fromkeys((model or None, None))
    return [queue_of(connection, priority, name) for priority in keys.PRIORITIES for name in names]


def fetch(connection: redis.Redis, job_id: str) -> rq.job.Job:
    """Return a job by its id; raises InputError if it does not exist or its record cannot be read."""
    (job,) = fetch_many(connection, [job_id])
    if job is None:
        raise no_such_job(job_id)
    return job


def fetch_many(connection: redis.Redis, job_ids: Sequence[str]) -> Iterator[rq.job.Job | None]:
    """Find jobs in the order of their ids, None for missing ones; raises InputError if one cannot be read."""
    for found in read_many(connection, job_ids):
        if isinstance(found, UnreadableJobError):
            raise InputError(
                f"{found} Another program has written it; "
                f"`redis-cli -u $(svdq redis url) del {key_of(found.job_id).decode()}` removes it."
            ) from found
        yield found


def no_such_job(job_id: str) -> InputError:
    """Create the error for a job that does not exist."""
    days = keys.RESULT_TTL_S // keys.DAY_S
    return InputError(f"There is no job {job_id!r}; `svdq list` shows all jobs (finished ones for {days} days).")


def statuses(connection: redis.Redis, job_ids: Sequence[str]) -> list[str | None]:
    """Read only the RQ statuses of jobs, even if other fields are unreadable; None for missing jobs."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(key_of(job_id), "status")
        found = pipeline.execute(raise_on_error=False)
    for error in found:
        if isinstance(error, RedisError) and not str(error).startswith("WRONGTYPE"):
            raise error
    return [status.decode(errors="replace") if isinstance(status, bytes) else None for status in found]


def read_arguments(rq_job: rq.job.Job) -> "JobArguments | None":
    """Return the arguments of an RQ job, or None if it is not ours; nothing is imported or called."""
    # Imported here since it imports all families, which commands that read no job do without.
    from svdq.producer.job import JobArguments

    try:
        return JobArguments.model_validate(rq_job.kwargs) if rq_job.func_name == RENDER else None
    except Exception:  # noqa: BLE001 - anyone can write to Redis; an invalid job is not ours
        return None


def read_job(rq_job: rq.job.Job) -> "Job | None":
    """Return our job in an RQ job, or None if it is not ours."""
    arguments = read_arguments(rq_job)
    return arguments.job if arguments else None


def is_ours(rq_job: rq.job.Job) -> bool:
    """Return whether a job is in one of our queues: other programs may use the same Redis."""
    return is_queue(rq_job.origin)
