"""All contact with RQ's internals: one worker that holds several executions at once. Knows no ranks and no videos.

RQ's own workers run one job at a time. This one pops, admits, beats and finishes jobs one by one in any order, as RQ's
tools expect to see it. Written against rq 2.12; `tests/worker/test_rq_adapter.py` says what broke when RQ changes.
Nothing that a job names is ever imported or called: its function and callbacks are strings to compare.
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import redis
import rq
from rq.command import parse_payload
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import JobStatus
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import as_text, now, utcformat
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry, register

from svdq.pipeline.errors import SvdqError
from svdq.producer.job import Job
from svdq.producer.queue import SvdqQueue, queues, read_job
from svdq.worker.inert_job import InertJob, refusal_of

logger = logging.getLogger(__name__)

#: Seconds without a beat after which RQ's maintenance takes a job for abandoned.
LEASE_S = 15
#: Seconds between beats.
BEAT_S = 4.0
#: Seconds between runs of RQ's maintenance.
MAINTENANCE_S = 5.0

#: `Job.heartbeat` for a job that still exists: HSET alone would make a job out of nothing after it was deleted.
_BEAT = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], 'last_heartbeat', ARGV[1]) end"


@dataclass(frozen=True, kw_only=True)
class Flight:
    """One execution of a job that this worker holds."""

    #: RQ's job.
    rq_job: rq.job.Job
    #: The queue it came from.
    queue: rq.Queue
    #: RQ's record of this execution.
    execution: Execution
    #: What is to be made.
    job: Job


class GroupWorker(BaseWorker):
    """An RQ worker for a group of ranks: several executions at once, JSON only, no fork, no signals."""

    queue_class = SvdqQueue  # type: ignore[assignment]  # RQ types it as the base class itself

    def __init__(self, connection: redis.Redis, *, on_stop: Callable[[str], None], on_shutdown: Callable[[], None]):
        """Make the worker; nothing is registered yet.

        Args:
            connection: of the bookkeeping thread's own.
            on_stop: called from RQ's listening thread with a job id when RQ's stop command names a job.
            on_shutdown: called from there on RQ's shutdown command.
        """
        super().__init__(
            queues(connection),
            name=f"svdq-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            connection=connection,
            serializer=JSONSerializer,
            job_class=InertJob,
            job_monitoring_interval=BEAT_S,
            worker_ttl=LEASE_S,
            log_job_description=False,
        )
        for queue in self.queues:
            queue.job_class = InertJob
        self._on_stop = on_stop
        self._on_shutdown = on_shutdown

    # What RQ calls or asks, changed for several executions.

    def get_heartbeat_ttl(self, job: rq.job.Job) -> int:
        """Give the lease of an execution; RQ's own adds a minute."""
        return LEASE_S

    def set_current_job_id(self, job_id: str | None = None, pipeline: Any = None) -> None:
        """Name no current job: there are several, and rq-dashboard fails on one that is stored as JSON."""

    def procline(self, message: str) -> None:
        """Leave the process's title alone."""

    def handle_payload(self, message: Any) -> None:
        """Take RQ's commands: stop a job (whichever of ours it names) and shut down."""
        try:
            payload = parse_payload(message)
            command, job_id = payload["command"], payload.get("job_id")
        except (ValueError, LookupError, AttributeError, TypeError):
            # Anyone can publish here, and an error would end the thread that listens.
            logger.warning("A command that is not one of RQ's was ignored.")
            return
        if command == "stop-job":
            self._on_stop(str(job_id))
        elif command == "shutdown":
            self._on_shutdown()

    # The life of the worker.

    def start(self) -> None:
        """Show up in RQ's registries and listen for commands."""
        self.register_birth()
        self.subscribe()
        self.set_state(WorkerStatus.IDLE)

    def end(self) -> None:
        """Leave RQ's registries."""
        self.unsubscribe()
        self.register_death()

    def beat(self, flights: Iterable[Flight]) -> None:
        """Prolong the leases of the worker and of every execution, in one round trip.

        Written whole, not only prolonged: after the server was away for longer than a lease, the records are gone.
        """
        flights = list(flights)
        with self.connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize())
            register(self, pipeline)
            self.set_state(WorkerStatus.BUSY if flights else WorkerStatus.IDLE, pipeline=pipeline)
            self.heartbeat(pipeline=pipeline)
            for flight in flights:
                flight.execution.save(LEASE_S, pipeline=pipeline)
                flight.execution.heartbeat(flight.queue.started_job_registry, LEASE_S, pipeline=pipeline)
                pipeline.eval(_BEAT, 1, flight.rq_job.key, utcformat(now()))
            pipeline.execute()

    def maintain(self) -> None:
        """Run RQ's maintenance: jobs whose worker is gone go back to their queue or fail.

        As `run_maintenance_tasks` does, but a queue that cannot be cleaned keeps no lock and no other queue waiting.
        """
        for queue in self.queues:
            if not queue.acquire_maintenance_lock():
                continue
            try:
                clean_registries(queue)
                clean_worker_registry(queue)
                queue.intermediate_queue.cleanup(self, queue)
            except (redis.ConnectionError, redis.TimeoutError):
                raise
            except Exception:
                logger.exception("RQ's maintenance of %s failed.", queue.name)
            finally:
                queue.release_maintenance_lock()

    # The life of an execution.

    def peek(self) -> rq.job.Job | None:
        """Look at the job that `pop` would take next, without taking it."""
        for queue in self.queues:
            job_ids = self.connection.lrange(queue.key, 0, 0)
            if job_ids:
                return self._fetch(job_ids[0])
        return None

    def num_queued(self) -> int:
        """Count the jobs that wait."""
        return sum(queue.count for queue in self.queues)

    def pop(self) -> Flight | None:
        """Take the next job off the queues, most urgent queue first, and start its execution.

        A job that is not ours, or not valid, ends as failed with a reason, and the next one is looked at.
        """
        for queue in self.queues:
            # RQ's own dequeue_any uses LMOVE for one queue only: with several, a kill here would lose the job.
            while (popped := SvdqQueue.lmove(self.connection, queue.key, None)) is not None:
                rq_job = self._fetch(popped[1])
                if rq_job is None:
                    logger.warning("Dropped %r from %s: there is no readable job of that id.", popped[1], queue.name)
                    self.connection.lrem(queue.intermediate_queue_key, 1, popped[1])
                    continue
                flight = self._admit(rq_job, queue)
                if flight is not None:
                    return flight
        return None

    def _fetch(self, job_id: bytes | str) -> rq.job.Job | None:
        try:
            return InertJob.fetch(as_text(job_id), connection=self.connection, serializer=JSONSerializer)
        except (NoSuchJobError, ValueError, TypeError, redis.ResponseError):  # ValueError: not even the shape of an id
            return None

    def _admit(self, rq_job: rq.job.Job, queue: rq.Queue) -> Flight | None:
        # As Job.perform does: a job with a time to live must not expire while it runs, nor as soon as it has failed.
        self.connection.persist(rq_job.key)
        refusal = refusal_of(rq_job)
        job = None if refusal else read_job(rq_job)
        if job is None:
            reason = refusal or "Its parameters are not those of a svdq job."
            logger.error("Job %s was refused: %s", rq_job.id, reason)
            self._fail(rq_job, queue, None, f"Refused: {reason} Nothing was run; enqueue with `svdq submit`.")
            self.connection.lrem(queue.intermediate_queue_key, 1, rq_job.id)
            return None
        execution = self.prepare_execution(rq_job)
        self.execution = None  # one slot for several executions: it is set around the finish calls only
        self.prepare_job_execution(rq_job, remove_from_intermediate_queue=True)
        return Flight(rq_job=rq_job, queue=queue, execution=execution, job=job)

    def succeed(self, flight: Flight, result: dict[str, Any]) -> None:
        """End a job as finished, with its result."""
        rq_job = flight.rq_job
        rq_job.ended_at = now()
        rq_job._result = result
        rq_job._status = JobStatus.FINISHED
        self.execution = flight.execution
        try:
            self.handle_job_success(rq_job, flight.queue, flight.queue.started_job_registry)
        finally:
            self.execution = None

    def fail(self, flight: Flight, reason: str) -> None:
        """End a job as failed, for good: the same seed would fail the same way again."""
        self._fail(flight.rq_job, flight.queue, flight.execution, reason)
        if self.holds(flight):
            raise redis.ConnectionError("RQ could not write that a job failed")  # and does not say so

    def _fail(self, rq_job: rq.job.Job, queue: rq.Queue, execution: Execution | None, reason: str) -> None:
        rq_job.ended_at = now()
        rq_job.retries_left = None
        self.execution = execution
        try:
            self.handle_job_failure(rq_job, queue, queue.started_job_registry, exc_string=reason)
        finally:
            self.execution = None

    def stop(self, flight: Flight) -> None:
        """End a job as stopped: the user asked for it."""
        self._stopped_job_id = flight.rq_job.id
        self.fail(flight, "Stopped by the user.")

    def put_back(self, flights: Iterable[Flight]) -> None:
        """Give jobs back to the front of their queues, in their old order, spending none of their retries."""
        for flight in sorted(flights, key=lambda flight: flight.execution.created_at, reverse=True):
            if not self.holds(flight):
                continue
            with self.connection.pipeline() as pipeline:
                flight.execution.delete(job=flight.rq_job, pipeline=pipeline)
                flight.queue._enqueue_job(flight.rq_job, pipeline=pipeline, at_front=True)
                pipeline.execute()

    def holds(self, flight: Flight) -> bool:
        """Whether the execution is still ours: a group that slept past its lease has lost it."""
        registry = flight.queue.started_job_registry
        return self.connection.zscore(registry.key, flight.execution.composite_key) is not None

    def work(self, *_: Any, **__: Any) -> bool:
        """Refuse: `Intake` drives this worker."""
        raise SvdqError("This worker is driven by a group of ranks; start one with `svdq worker`.")
