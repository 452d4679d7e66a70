"""An RQ worker that holds several executions at once, written against rq 3.0; runs nothing that a job names."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import uuid4

import redis
import rq
from rq.executions import Execution
from rq.job import JobStatus
from rq.utils import utcformat
from rq.worker import WorkerStatus
from rq.worker_registration import register

from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.producer import keys
from svdq.producer.clock import CLOCK
from svdq.producer.job_control import cancel_rest
from svdq.producer.queue import RENDER, SvdqQueue, priority_of, queue_of, queues, read_arguments
from svdq.producer.text import count
from svdq.producer.untrusted_job import UntrustedJob, key_of, restored
from svdq.worker.ability import Ability
from svdq.worker.active_job import ActiveJob
from svdq.worker.queue import scripts
from svdq.worker.queue.abilities import Abilities
from svdq.worker.queue.crashes import MAX_ID_LENGTH, read_count
from svdq.worker.queue.rq_worker import LEASE_S, STOPPED, RqWorker

logger = logging.getLogger(__name__)

#: Due jobs that are queued, and jobs that are refused, at most, between two renewals of leases.
PROMOTED_AT_ONCE, LOOKED_AT_ONCE = 500, 100
UNREADABLE = (
    "Its parameters are not those of a job of this version of svdq; if a newer one submitted it, `svdq retry` it when "
    "the workers are upgraded."
)


class GroupWorker(RqWorker):
    """The RQ worker of a group of ranks."""

    queues: list[SvdqQueue]  # type: ignore[assignment]  # RQ types them as its own

    def __init__(
        self,
        connection: redis.Redis,
        *,
        ability: Ability = Ability(),  # noqa: B008 - frozen
        gpus: Sequence[str] = (),
        loras: LoraFolder = NO_LORAS,
        wait_for_able: bool = False,
        max_attempts: int = 2,
        **options: Any,
    ) -> None:
        """Make it, as `RqWorker` and `Abilities`, without registering it.

        A job that has ended its rank `max_attempts` times is set aside; see `crashes`.
        """
        super().__init__(connection, model=ability.model, **options)
        self._due: deque[tuple[rq.Queue, bytes]] = deque()
        self._always = self.queues  # whatever it can make
        self._max_attempts = max_attempts
        self.abilities = Abilities(connection, ability, self.name, gpus=gpus, loras=loras, wait_for_able=wait_for_able)

    def start(self) -> None:
        """Register in RQ, and look around."""
        super().start()
        self.look_around()

    def renew_leases(self, active_jobs: Iterable[ActiveJob], connection: redis.Redis | None = None) -> list[ActiveJob]:
        """Renew the leases of the worker and of all executions; return the jobs that are lost.

        Writes whole records, since they may have expired. A job is lost, too, if one of its keys has the wrong type.
        May be called beside all other methods, with a connection of that thread.
        """
        active_jobs, connection = list(active_jobs), connection or self.connection
        now_s = scripts.server_time(connection)
        now = datetime.fromtimestamp(now_s, UTC)
        CLOCK.note(now_s)
        state = WorkerStatus.BUSY if active_jobs else WorkerStatus.SUSPENDED if self.paused else WorkerStatus.IDLE
        with connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize())
            register(self, pipeline)
            self.set_state(state, pipeline=pipeline)
            self.heartbeat(LEASE_S, pipeline=pipeline)
            for active in active_jobs:
                renewal = connection.pipeline()
                active.execution.last_heartbeat = now
                scripts.write_lease(renewal, active.queue, active.execution, now_s + LEASE_S, LEASE_S)
                active.rq_job.heartbeat(now, LEASE_S, pipeline=renewal)
                entry = active.execution.composite_key
                scripts.while_held(pipeline, self.name, active.queue, entry, renewal.command_stack)
            answers = pipeline.execute(raise_on_error=False)
        renewed = answers[len(answers) - len(active_jobs) :]
        scripts.check_answers(renewed)
        return [active for active, answer in zip(active_jobs, renewed, strict=True) if answer != 1]

    def look_around(self) -> None:
        """Say what this group can make, and choose the queues: before its own, those that other groups leave to it."""
        self.abilities.look()
        models = {"", *(queue.model for queue in self._always)}
        left = [each for each in queues(self.connection) if each.unable and each.model in models]
        mine = [*filter(self.abilities.reads, left), *self._always]
        self.queues = sorted(mine, key=lambda queue: keys.PRIORITIES.index(priority_of(queue.name)))

    def forget(self, active: ActiveJob, connection: redis.Redis | None = None) -> None:
        """Remove the record of an execution that was lost, without changing its job."""
        with (connection or self.connection).pipeline() as pipeline:
            active.execution.delete(job=active.rq_job, pipeline=pipeline)
            pipeline.execute(raise_on_error=False)  # a key may have the wrong type

    def num_scheduled(self) -> tuple[int, int]:
        """Count the scheduled jobs that are due and not queued yet, and the jobs that are due later."""
        registries = [queue.scheduled_job_registry.key for queue in self.queues]
        now_s = int(scripts.server_time(self.connection))
        due = sum(self.connection.zcount(key, "-inf", now_s) for key in registries)
        later = sum(self.connection.zcount(key, f"({now_s}", "+inf") for key in registries)
        return due, later

    def promote_due(self) -> bool:
        """Queue some due jobs, earliest first, that nobody else has; return whether more are due."""
        if not self._due:
            self._due.extend(self._list_due())
        some = [self._due.popleft() for _ in range(min(len(self._due), PROMOTED_AT_ONCE))]
        if some:
            with self.connection.pipeline(transaction=False) as pipeline:
                for queue, due in groupby(some, itemgetter(0)):
                    scripts.promote(pipeline, queue, [job_id for _, job_id in due])
                answers = pipeline.execute(raise_on_error=False)
            if num_queued := sum(answer for answer in answers if isinstance(answer, int)):
                logger.info("Queued what was due: %s.", count(num_queued, "job"))
        return bool(self._due)

    def _list_due(self) -> list[tuple[rq.Queue, bytes]]:
        """Return the due jobs of each queue, earliest first; jobs of the same second, RQ's unit, by their creation."""
        now_s = int(CLOCK.now().timestamp())
        with self.connection.pipeline(transaction=False) as pipeline:
            for queue in self.queues:
                pipeline.zrangebyscore(queue.scheduled_job_registry.key, "-inf", now_s, withscores=True)
            answers = pipeline.execute(raise_on_error=False)
            scripts.check_answers(answers)
            found = [
                (place, due_at, job_id)
                for place, answer in enumerate(answers)
                if isinstance(answer, list)  # else RQ did not write it
                for job_id, due_at in answer
            ]
            for _, _, job_id in found:
                pipeline.hget(key_of(job_id), "created_at")
            ages = [age if isinstance(age, bytes) else b"" for age in pipeline.execute(raise_on_error=False)]
        by_age = sorted((place, due_at, age, job_id) for (place, due_at, job_id), age in zip(found, ages, strict=True))
        return [(self.queues[place], job_id) for place, _, _, job_id in by_age]

    def take(self, number: int = 1, known: str = "") -> tuple[list[ActiveJob], scripts.Pop]:
        """Start up to `number` of the next jobs, in two round trips; jobs that are not valid are failed or dropped.

        `known` is the id of a job whose arguments the caller has already, if it is still the next one. Returns the
        started jobs, and the last pop, which has seen what is behind them.
        """
        jobs: list[ActiveJob] = []
        for _ in range(LOOKED_AT_ONCE):
            popped = scripts.pop(
                self.connection,
                self.queues,
                self.name,
                number - len(jobs),
                pause=self.pause_field,
                known=known.encode(),
            )
            self.paused = popped.paused
            is_last = len(popped.jobs) < number - len(jobs) or any(found.is_suspect for found in popped.jobs)
            if valid := [active for found in popped.jobs if (active := self._check(found)) is not None]:
                jobs += self._begin(valid, popped.now_s)
            if is_last or len(jobs) == number:
                break
        return jobs, popped

    def _check(self, found: scripts.QueuedJob) -> ActiveJob | None:
        """Return a popped job that may begin, with the execution that is to be written; take others off the queue."""
        queue, rq_job = found.queue, restored(self.connection, found.job_id, found.record)
        try:
            if isinstance(rq_job, UntrustedJob):
                return self._admit(rq_job, found)
        except redis.ResponseError as error:
            if not scripts.is_wrong_type(error):
                raise
        self._drop_unreadable(queue, found.job_id)
        return None

    def _drop_unreadable(self, queue: rq.Queue, job_id: bytes | str) -> None:
        logger.warning("Dropped %r from %s: its record cannot be read.", job_id, queue.name)
        scripts.drop_popped(self.connection, queue, job_id)

    def _admit(self, rq_job: UntrustedJob, found: scripts.QueuedJob) -> ActiveJob | None:
        status, queue = rq_job.get_status(refresh=False), found.queue
        if status not in (JobStatus.QUEUED, None):
            # Canceled meanwhile; or in the queue twice, since a client that gets no answer enqueues again.
            if status is not JobStatus.CANCELED:
                logger.warning(
                    "Dropped an entry of job %s from %s: it is %s already.", rq_job.id, queue.name, status.value
                )
            scripts.drop_popped(self.connection, queue, rq_job.id)
            return None
        crashes = read_count(self.connection, rq_job.id) if found.is_suspect else None
        if crashes is not None and crashes.is_too_many(self._max_attempts):
            logger.error("Job %s is set aside: %s", rq_job.id, crashes.reason)
            self.fail_popped(rq_job, queue, crashes.reason)
            return None
        refusal = refusal_of(rq_job)
        arguments = None if refusal else read_arguments(rq_job)
        if not refusal and (lacking := self.abilities.lacking(queue, arguments, rq_job.kwargs)):
            target = queue_of(self.connection, priority_of(queue.name), queue.model, lacking.unable)
            if scripts.leave(self.connection, self.name, queue, target, rq_job.id, lacking.waits_for):
                logger.info("Job %s waits for %s, which this group has not.", rq_job.id, lacking.waits_for)
            return None
        if arguments is None:
            reason = refusal or UNREADABLE
            logger.error("Job %s was refused: %s", rq_job.id, reason)
            self.fail_popped(rq_job, queue, f"Refused: {reason} Nothing was run; enqueue with `svdq submit`.")
            return None
        if found.is_canceled:
            cancel_rest(self.connection, [rq_job.id])
            self.fail_popped(rq_job, queue, STOPPED, JobStatus.STOPPED)
            return None
        rq_job.origin = queue.name  # RQ chooses registries by it
        execution = Execution(uuid4().hex, rq_job.id, connection=self.connection, worker_name=self.name)
        return ActiveJob(
            rq_job=rq_job, queue=queue, execution=execution, arguments=arguments, is_suspect=found.is_suspect
        )

    def _begin(self, jobs: Sequence[ActiveJob], now_s: float) -> list[ActiveJob]:
        """Start the executions of popped jobs; return those that were not canceled, deleted or returned meanwhile."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for active in jobs:
                rq_job, queue = active.rq_job, active.queue
                # RQ's `prepare_execution` and `prepare_job_execution` in one step.
                begins = self.connection.pipeline()
                # As in Job.perform: a job with a time to live must not expire while it runs.
                begins.persist(rq_job.key)
                begins.hset(rq_job.key, "origin", queue.name)
                scripts.write_lease(begins, queue, active.execution, now_s + LEASE_S, LEASE_S)
                rq_job.prepare_for_execution(self.name, pipeline=begins)
                rq_job.started_at = datetime.fromtimestamp(now_s, UTC)  # RQ's is by this host's clock
                begins.hset(rq_job.key, "started_at", utcformat(rq_job.started_at))
                scripts.drop_popped(begins, queue, rq_job.id)
                self.set_state(WorkerStatus.BUSY, pipeline=begins)
                scripts.begin(pipeline, self.name, active.execution, begins)
            answers = pipeline.execute(raise_on_error=False)
        scripts.check_answers(answers)
        for active, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                self._drop_unreadable(active.queue, active.id)
            elif answer != 1:
                logger.info("Job %s was canceled, deleted or taken back before it was begun.", active.id)
                if answer == -1:
                    scripts.drop_popped(self.connection, active.queue, active.id)
        return [active for active, answer in zip(jobs, answers, strict=True) if answer == 1]

    def was_canceled(self, job_id: str) -> bool:
        """Whether the user canceled a job in flight."""
        return bool(self.connection.sismember(keys.CANCELED, job_id))

    def mark_canceled(self, job_id: str) -> None:
        """Make the ranks stop a job at its next step."""
        self.connection.sadd(keys.CANCELED, job_id)

    def pause(self, reason: str) -> None:
        """Take no more jobs until the user runs `svdq resume`."""
        self.connection.hset(keys.PAUSES, self.pause_field, reason)

    def has_paused(self) -> bool:
        """Whether this group has paused itself."""
        return bool(self.connection.hexists(keys.PAUSES, self.pause_field))

    def return_to_queue(self, active_jobs: Iterable[ActiveJob]) -> None:
        """Return jobs to the front of their queues, in their old order, without spending retries."""
        for active in sorted(active_jobs, key=lambda active: active.execution.created_at, reverse=True):
            scripts.return_to_queue(self.connection, active.queue, active.execution)


def refusal_of(rq_job: rq.job.Job) -> str | None:
    """Return why a job must not run; None if it may."""
    try:
        function = rq_job.func_name
    except Exception:  # noqa: BLE001 - anyone can write to Redis
        return "It is not stored as JSON."
    if function != RENDER:
        return f"Its function {function!r} is not svdq's."
    if len(rq_job.id) > MAX_ID_LENGTH:
        return f"Its id has {len(rq_job.id)} characters, and at most {MAX_ID_LENGTH} are allowed."
    named = (rq_job._success_callback_name, rq_job._failure_callback_name, rq_job._stopped_callback_name)
    for name in filter(None, named):
        return f"Its callback {name!r} is not run: enqueue a job that depends on it instead."
    if rq_job.webhooks:
        return f"Its webhook {rq_job.webhooks[0].url!r} is not sent: enqueue a job that depends on it instead."
    if rq_job.has_rate_limit:
        return f"Its rate limit {rq_job.rate_limit_key!r} is not kept: enqueue it without one."
    return None
