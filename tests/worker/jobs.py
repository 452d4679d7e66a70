"""Jobs without photos in real queues, a clock that tests set, and connections to Redis that break at a command."""

from collections.abc import Callable

import redis

from svdq.producer.queue import SvdqQueue
from svdq.worker.active_job import ActiveJob
from svdq.worker.queue.group_worker import GroupWorker
from tests.queued import SvdJob, enqueue

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=8)


def put(connection: redis.Redis, *job_ids: str, priority: str = "default") -> None:
    for job_id in job_ids:
        enqueue(connection, JOB, job_id, priority)


def waiting(connection: redis.Redis, priority: str = "default") -> list[str]:
    """The ids in a queue, next one first."""
    return SvdqQueue(f"svdq-{priority}", connection=connection).get_job_ids()


def leases(connection: redis.Redis, priority: str = "default") -> dict[str, float]:
    """The leases of a queue: `job:execution` to the time when it ends."""
    return {key.decode(): end for key, end in connection.zrange(f"rq:wip:svdq-{priority}", 0, -1, withscores=True)}


class Clock:
    """A monotonic clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pop(worker: GroupWorker) -> ActiveJob | None:
    """Have a group take the next job."""
    return next(iter(worker.take()[0]), None)


def _nothing(commands: str) -> None: ...


class HookedRedis(redis.Redis):
    """Calls two functions with the text of each script and pipeline: before it is sent, and when it was executed."""

    before: Callable[[str], None] = staticmethod(_nothing)
    after: Callable[[str], None] = staticmethod(_nothing)

    def eval(self, script: str, *arguments: object) -> object:
        self.before(str(arguments))
        answer = super().eval(script, *arguments)
        if answer[2] if isinstance(answer, list) else answer:  # without a job, nothing was popped
            self.after(script)
        return answer

    def pipeline(self, *arguments: object, **options: object) -> redis.client.Pipeline:
        pipeline = super().pipeline(*arguments, **options)
        execute = pipeline.execute

        def execute_between(*arguments: object, **options: object) -> object:
            commands = str(pipeline.command_stack)
            try:
                self.before(commands)
            except redis.RedisError:
                pipeline.reset()
                raise
            answers = execute(*arguments, **options)
            self.after(commands)
            return answers

        pipeline.execute = execute_between
        return pipeline


def slow_worker(url: str, meanwhile: Callable[[], object]) -> GroupWorker:
    """Make a group that sleeps between the pop of a job and its begin; something happens meanwhile."""
    connection = HookedRedis.from_url(url)
    connection.after = lambda script: meanwhile() if "lmove" in script else None
    return GroupWorker(connection)


class LossyRedis(HookedRedis):
    """A Redis that goes away once, at a command with `lost` in it."""

    lost = ""
    error: type[redis.RedisError] = redis.ConnectionError

    def lose(self, commands: str) -> None:
        if self.lost and self.lost in commands:
            self.lost = ""
            raise self.error("Connection closed by server.")


def lossy(url: str, lost: str, *, written: bool = True, error: type[redis.RedisError] = redis.ConnectionError):
    """Connect to a Redis that goes away before such a command or, if it is `written`, before it could say so."""
    connection = LossyRedis.from_url(url)
    connection.lost, connection.error = lost, error
    setattr(connection, "after" if written else "before", connection.lose)
    return connection
