"""The base of `group_worker`, which takes no jobs: registration, RQ's commands, maintenance, and the ends of jobs."""

import contextlib
import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import redis
import rq
from redis.client import Pipeline
from rq.command import PUBSUB_CHANNEL_TEMPLATE, parse_payload
from rq.executions import Execution
from rq.job import JobStatus
from rq.rate_limit import release_slot
from rq.registry import BaseRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, clean_worker_registry

from svdq.producer import keys, processes
from svdq.producer.clock import CLOCK
from svdq.producer.job_control import cancel_rest
from svdq.producer.outbox import Event
from svdq.producer.queue import SvdqQueue, queues, queues_for
from svdq.producer.untrusted_job import UntrustedJob, key_of
from svdq.worker.active_job import ActiveJob
from svdq.worker.queue import scripts

logger = logging.getLogger(__name__)

LEASE_S = 15  # seconds without a renewal after which a job counts as abandoned, and a worker as ended
BEAT_S, MAINTENANCE_S = 4.0, 2.0  # seconds between renewals, and between searches for abandoned jobs of other groups
ANSWER_S = 5.0  # seconds that the start waits for the answer to a subscription
COMMANDS_AT_ONCE = 100  # commands of RQ that are read, at most, between two renewals of leases
CLOCKS_S = 60  # by which the clocks of hosts may be behind the clock of Redis
STOPPED = "Stopped by the user."


class Command(NamedTuple):
    """A command of RQ: to stop a job, or one execution of it, or to take no more jobs."""

    name: str  # "stop-job", "stop-execution" or "shutdown"
    job_id: str
    execution_id: str  # "" for any


class _End(NamedTuple):
    rq_job: rq.job.Job
    queue: rq.Queue
    execution: Execution | None  # None while it is only popped
    status: JobStatus
    outcome: dict[str, Any] | str  # its result, or why it has none

    @property
    def entry(self) -> str:
        return self.execution.composite_key if self.execution else self.rq_job.id

    @property
    def event(self) -> Event:
        return "video.completed" if self.status is JobStatus.FINISHED else "video.failed"


class RqWorker(BaseWorker):
    """An RQ worker that ends jobs in any order; it uses JSON only, and neither forks nor handles signals."""

    queue_class = SvdqQueue  # type: ignore[assignment]  # RQ types it as the base class itself

    def __init__(
        self,
        connection: redis.Redis,
        *,
        is_burst: bool = False,
        model: str | None = None,
    ) -> None:
        """Make it, without registering it; it takes the jobs for `model` alone first, then the jobs for any model."""
        super().__init__(
            queues_for(connection, model),
            name=processes.worker_name(),
            connection=connection,
            serializer=JSONSerializer,
            job_class=UntrustedJob,
            worker_ttl=LEASE_S,
        )
        self.pause_field = keys.BURSTS if is_burst else self.name  # of `keys.PAUSES`; bursts pause together
        self.paused = False  # whether the last `pop` found intake paused
        self._canceled_from_s = 0  # jobs that were canceled before have been looked at

    def listen(self) -> list[Command]:
        """Return RQ's next commands, without waiting for any; call `stop_listening` after an error of Redis."""
        if self.pubsub is None:
            self.pubsub = self.connection.pubsub(ignore_subscribe_messages=True)
            self.pubsub.subscribe(self.pubsub_channel_name)
        # Anyone can publish here, without end.
        messages = islice(iter(self.pubsub.get_message, None), COMMANDS_AT_ONCE)
        return [command for message in messages if (command := _command_of(message))]

    def stop_listening(self) -> None:
        """Close the connection for commands: one whose subscription was refused would never get any."""
        if self.pubsub is not None:
            self.pubsub.close()
            self.pubsub = None

    def start(self) -> None:
        """Register in RQ; may be called again after an error of Redis."""
        if self.birth_date is None:
            self.register_birth()
        self.set_state(WorkerStatus.IDLE)

    def end(self) -> None:
        """Remove the worker from RQ's registries."""
        self.connection.hdel(keys.PAUSES, self.name)
        self.stop_listening()
        self.register_death()

    def maintain(self) -> None:
        """Remove expired entries of RQ's registries; finish what dead workers and RQ's tools have left half done."""
        now_s = int(scripts.server_time(self.connection))  # RQ itself uses the host's clock, and spends retries
        found = queues(self.connection)  # also of models that no worker runs now
        with self.connection.pipeline(transaction=False) as pipeline:
            for queue in found:
                FinishedJobRegistry(queue.name, connection=pipeline).cleanup(now_s)
                FailedJobRegistry(queue.name, connection=pipeline).cleanup(now_s)
                pipeline.smembers(WORKERS_BY_QUEUE_KEY % queue.name)
                pipeline.zrangebyscore(queue.canceled_job_registry.key, self._canceled_from_s, "+inf")
                pipeline.exists(queue.ready_job_registry.key)
            answers = pipeline.execute(raise_on_error=False)
            for number, error in enumerate(answers):
                if isinstance(error, Exception):  # a key may have the wrong type
                    logger.error("The clean-up of %s failed: %s", found[number // 5].name, error)
            workers = [answer if isinstance(answer, set) else set() for answer in answers[2::5]]
            names = sorted(set().union(*workers))
            for name in names:
                pipeline.exists(name)
            gone = {name for name, is_there in zip(names, pipeline.execute(), strict=True) if not is_there}
        for queue, of_queue, has_ready in zip(found, workers, answers[4::5], strict=True):
            if of_queue & gone:
                clean_worker_registry(queue)
            if has_ready:  # since the worker that ended what they depended on was killed
                queue.ready_job_registry.cleanup()
        canceled = [job_id for answer in answers[3::5] if isinstance(answer, list) for job_id in answer]
        if canceled:
            cancel_rest(self.connection, map(scripts.text_of, canceled), of=(JobStatus.CANCELED.value,))
        self._canceled_from_s = now_s - CLOCKS_S

    def fail_popped(
        self, rq_job: rq.job.Job, queue: rq.Queue, reason: str, status: JobStatus = JobStatus.FAILED
    ) -> None:
        """End a job that was popped and not begun as failed or stopped, unless it was taken back."""
        self._end_one(_End(rq_job, queue, None, status, reason))

    def finish(self, ends: Sequence[tuple[ActiveJob, dict[str, Any]]]) -> list[bool | redis.ResponseError]:
        """End jobs as finished, each with its result, in one round trip, and queue the jobs that depend on them.

        Returns for each job True, False if it is held no longer, or the error if a key of it has the wrong type.
        """
        return self._end(
            [_End(each.rq_job, each.queue, each.execution, JobStatus.FINISHED, made) for each, made in ends]
        )

    def fail(self, active: ActiveJob, reason: str) -> bool:
        """End a job as failed; return whether it was held. RQ's Retry is not used: the same seed would fail again."""
        return self._end_one(_End(active.rq_job, active.queue, active.execution, JobStatus.FAILED, reason))

    def stop(self, active: ActiveJob) -> bool:
        """End a job as stopped by the user, and cancel the rest of its chain, which RQ would keep waiting."""
        cancel_rest(self.connection, [active.id])
        return self._end_one(_End(active.rq_job, active.queue, active.execution, JobStatus.STOPPED, STOPPED))

    def _end_one(self, end: _End) -> bool:
        [answer] = self._end([end])
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    def _end(self, ends: Sequence[_End]) -> list[bool | redis.ResponseError]:
        with self.connection.pipeline(transaction=False) as pipeline:
            for end in ends:
                commands = self.connection.pipeline()
                self._put_end(commands, end)
                stack = commands.command_stack
                scripts.while_held(pipeline, self.name, end.queue, end.entry, stack, event=end.event, alone=True)
            answers = pipeline.execute(raise_on_error=False)
        scripts.check_answers(answers)
        for number, end in enumerate(ends):
            if answers[number] == scripts.HAS_DEPENDENTS:
                answers[number] = self._end_with_dependents(end)
            if answers[number] == 1:
                release_slot(end.rq_job)  # of RQ's rate limits; jobs with one are refused
        return [answer if isinstance(answer, redis.ResponseError) else answer != 0 for answer in answers]

    def _end_with_dependents(self, end: _End) -> int | redis.ResponseError:
        """End a job and mark the jobs that depend on it as ready, in one step; then RQ queues these."""
        end.rq_job._status = end.status  # which RQ looks at; Redis has it afterwards
        while True:
            with self.connection.pipeline() as pipeline, contextlib.suppress(redis.WatchError):
                ready = self._put_dependents(pipeline, end.queue, end.rq_job)
                self._put_end(pipeline, end)
                commands, pipeline.command_stack = pipeline.command_stack, []
                scripts.while_held(pipeline, self.name, end.queue, end.entry, commands, event=end.event)
                [answer] = pipeline.execute(raise_on_error=False)
                scripts.check_answers([answer])
                if answer == 1:
                    end.queue.enqueue_ready_jobs_by_queue(ready)
                return cast(int | redis.ResponseError, answer)

    def _put_dependents(self, pipeline: Pipeline, queue: rq.Queue, rq_job: rq.job.Job) -> dict[str, list[str]]:
        """Put what marks dependents as ready into a pipeline; an error of RQ with a malformed one is logged."""
        try:
            pipeline.watch(rq_job.dependents_key)
            ready = queue.move_dependents_to_ready(rq_job, pipeline=pipeline, refresh_job_status=False)
        except Exception as error:
            if isinstance(error, redis.RedisError) and not scripts.is_wrong_type(error):
                raise
            logger.exception("The jobs that depend on %s could not be queued.", rq_job.id)
            pipeline.reset()
            ready = {}
        if not pipeline.explicit_transaction:  # RQ has found none
            pipeline.multi()
        return ready

    def _put_end(self, commands: Pipeline, end: _End) -> None:
        """Put what RQ's `handle_job_success` and `handle_job_failure` write into a pipeline."""
        rq_job, queue, execution, status, outcome = end
        if execution is None:
            commands.persist(rq_job.key)  # a job with a time to live must not expire as soon as it has failed
            scripts.drop_popped(commands, queue, rq_job.id)
        rq_job.ended_at = CLOCK.now()
        rq_job.set_status(status, pipeline=commands)
        made: dict[str, Any] = {
            "worker_name": self.name,
            "execution_id": execution and execution.id,
            "execution_started_at": execution and execution.created_at,
            "execution_ended_at": rq_job.ended_at,
        }
        if status is JobStatus.FINISHED:
            rq_job._result = outcome
            # With 0, RQ deletes what depends on the job before that is queued.
            ttl_s = rq_job.get_result_ttl(self.default_result_ttl) or 60
            self.increment_successful_job_count(commands)
            rq_job._handle_success(ttl_s, commands, **made)
            if rq_job.result_ttl != 0:
                self._keep_until(commands, rq_job.finished_job_registry, rq_job, ttl_s)
            rq_job.cleanup(ttl_s, pipeline=commands, remove_from_queue=False)
        else:
            rq_job._handle_failure(str(outcome), commands, **made)
            self._keep_until(commands, rq_job.failed_job_registry, rq_job, rq_job.failure_ttl)
            if status is JobStatus.STOPPED:
                now_s = scripts.server_time(self.connection)
                commands.zadd(keys.STOPPED, {rq_job.id: now_s + keys.FAILURE_TTL_S})
                commands.zremrangebyscore(keys.STOPPED, "-inf", now_s)
            else:
                self.increment_failed_job_count(commands)
        if rq_job.started_at is not None:
            self.increment_total_working_time(rq_job.ended_at - rq_job.started_at, commands)
        if execution is not None:
            execution.delete(job=rq_job, pipeline=commands)
        commands.srem(keys.CANCELED, rq_job.id)
        commands.hdel(keys.CRASHES, rq_job.id)

    def _keep_until(self, commands: Pipeline, registry: BaseRegistry, rq_job: rq.job.Job, ttl_s: int | None) -> None:
        """Correct when an entry expires, which RQ counts by this host's clock, and which says when the job ended."""
        if ttl_s is not None and ttl_s >= 0 and rq_job.ended_at is not None:
            commands.zadd(registry.key, {rq_job.id: int(rq_job.ended_at.timestamp()) + ttl_s}, xx=True)

    def release_deferred(self, queue: rq.Queue) -> None:
        """Queue the jobs of a queue that depend on ended ones: a worker before RQ 3 was killed before it did that."""
        deferred: Any = self.connection.zrange(queue.deferred_job_registry.key, 0, -1)
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in deferred:
                pipeline.smembers(key_of(b":" + job_id) + b":dependencies")  # RQ's own spelling
            answers = pipeline.execute(raise_on_error=False)
        for job_id in set().union(*(answer for answer in answers if isinstance(answer, set))):
            parent = UntrustedJob.find(job_id, self.connection)
            if parent is not None and parent.get_status(refresh=False) in (JobStatus.FINISHED, JobStatus.FAILED):
                with self.connection.pipeline() as changes, contextlib.suppress(redis.WatchError):
                    ready = self._put_dependents(changes, queue, parent)
                    changes.execute()
                    queue.enqueue_ready_jobs_by_queue(ready)

    def confirm_end(self, active: ActiveJob) -> JobStatus | None:
        """Return the status of a job whose end Redis did not confirm, if this execution ended it; else None."""
        rq_job = UntrustedJob.find(active.id, self.connection)
        result = rq_job.latest_result() if rq_job is not None else None
        if rq_job is None or result is None or result.execution_id != active.execution.id:
            return None
        return rq_job.get_status(refresh=False)

    def holds_lease(self, active: ActiveJob) -> bool:
        """Whether this worker still holds a job: a group that slept past its lease has lost it."""
        return self.connection.zscore(*active.entry) is not None


def _command_of(message: Any) -> Command | None:
    """Read a command, which anyone may have published; None if it is not for this kind of worker."""
    try:
        payload = parse_payload(message)
        name, job_id, execution_id = (str(payload.get(field) or "") for field in ("command", "job_id", "execution_id"))
    except (ValueError, AttributeError, TypeError, RecursionError):
        name = ""
    if name in ("stop-job", "stop-execution", "shutdown"):
        return Command(name, job_id, execution_id)
    logger.warning("A command that is not one of RQ's was ignored.")
    return None


def check_rights(connection: redis.Redis) -> None:
    """Do what a user with the rights of a producer may not, and which its threads would fail at; raise its error.

    A cluster refuses what names several keys.
    """
    connection.exists(keys.POPPED, keys.CANCELED, keys.CRASHES)
    connection.client_list()
    with connection.pubsub() as listener:
        listener.subscribe(PUBSUB_CHANNEL_TEMPLATE % "svdq")
        listener.get_message(timeout=ANSWER_S)
