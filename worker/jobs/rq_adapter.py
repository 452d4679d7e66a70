"""Contact with RQ's internals: one worker that holds several executions at once. Knows no ranks and no videos.

RQ's own workers run one job at a time. This one pops, admits, beats and finishes jobs one by one in any order, as RQ's
tools expect to see it. Written against rq 2.12, like `rq_worker`, `rq_ends`, `handover`, `recovery`, `inert_job` and
`scheduler`; `tests/worker/test_rq_adapter.py` says what broke when RQ changes.
Nothing that a job names is ever imported or called: its function and callbacks are strings to compare.
"""

import logging
import time
from collections.abc import Iterable

import rq
from rq.executions import Execution
from rq.job import JobStatus
from rq.utils import now, utcformat
from rq.worker import WorkerStatus
from rq.worker_registration import register

from svdq.producer import keys
from svdq.producer.queue import read_job
from svdq.worker.jobs import handover
from svdq.worker.jobs.inert_job import InertJob, refusal_of
from svdq.worker.jobs.rq_ends import STOPPED, EndingWorker, Flight
from svdq.worker.jobs.rq_worker import LEASE_S

logger = logging.getLogger(__name__)

#: `Job.heartbeat` for a job that still exists: HSET alone would make a job out of nothing after it was deleted.
_BEAT = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], 'last_heartbeat', ARGV[1]) end"


class GroupWorker(EndingWorker):
    """The RQ worker of a group of ranks, which holds several executions at once."""

    # The life of its executions.

    def beat(self, flights: Iterable[Flight]) -> list[Flight]:
        """Prolong the leases of the worker and of every execution, in one round trip; return those that are lost.

        Written whole, not only prolonged: after the server was away for longer than a lease, the records are gone.
        """
        flights = list(flights)
        state = WorkerStatus.BUSY if flights else WorkerStatus.SUSPENDED if self.paused else WorkerStatus.IDLE
        with self.connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize())
            register(self, pipeline)
            self.set_state(state, pipeline=pipeline)
            self.heartbeat(LEASE_S, pipeline=pipeline)
            for flight in flights:
                flight.execution.save(LEASE_S, pipeline=pipeline)
                flight.execution.heartbeat(flight.queue.started_job_registry, LEASE_S, pipeline=pipeline)
                pipeline.eval(_BEAT, 1, flight.rq_job.key, utcformat(now()))
            for flight in flights:
                pipeline.zscore(flight.queue.started_job_registry.key, flight.execution.composite_key)
            leases = pipeline.execute()[-len(flights) :] if flights else pipeline.execute()[:0]
        lost = [flight for flight, lease in zip(flights, leases, strict=True) if lease is None]
        for flight in lost:
            self.forget(flight)
        return lost

    def forget(self, flight: Flight) -> None:
        """Remove what is left of an execution that is not ours any more; its job is not touched."""
        with self.connection.pipeline() as pipeline:
            flight.execution.delete(job=flight.rq_job, pipeline=pipeline)
            pipeline.execute()

    def peek(self) -> rq.job.Job | None:
        """Look at the job that `pop` would take next, without taking it."""
        for queue in self.queues:
            job_ids = self.connection.lrange(queue.key, 0, 0)
            if job_ids:
                return self.fetch(job_ids[0])
        return None

    def num_scheduled(self) -> tuple[int, int]:
        """Count the jobs that are due and not queued yet, and those whose time is still to come."""
        registries = [queue.scheduled_job_registry.key for queue in self.queues]
        now_s = int(time.time())
        due = sum(self.connection.zcount(key, "-inf", now_s) for key in registries)
        later = sum(self.connection.zcount(key, f"({now_s}", "+inf") for key in registries)
        return due, later

    def pop(self) -> Flight | None:
        """Take the next job off the queues, most urgent queue first, and start its execution.

        A job that is not ours, or not valid, ends as failed with a reason, and the next one is looked at.
        """
        while True:
            popped = handover.pop(self.connection, self.queues, self.name)
            self.paused = popped.paused
            if popped.queue is None:
                return None
            rq_job = self.fetch(popped.job_id)
            if rq_job is None:
                logger.warning(
                    "Dropped %r from %s: there is no readable job of that id.", popped.job_id, popped.queue.name
                )
                handover.drop_popped(self.connection, popped.queue, popped.job_id)
                continue
            flight = self._admit(rq_job, popped.queue)
            if flight is not None:
                return flight

    def fetch(self, job_id: bytes | str) -> rq.job.Job | None:
        """Read a job; None when there is none of that id that can be read."""
        return InertJob.find(job_id, self.connection)

    def _admit(self, rq_job: rq.job.Job, queue: rq.Queue) -> Flight | None:
        status = rq_job.get_status(refresh=False)
        if status not in (JobStatus.QUEUED, None):
            # Cancelled while it was on its way; or it stood in the queue twice, since a client of Redis that gets no
            # answer enqueues again.
            if status is not JobStatus.CANCELED:
                logger.warning(
                    "Dropped an entry of job %s from %s: it is %s already.", rq_job.id, queue.name, status.value
                )
            handover.drop_popped(self.connection, queue, rq_job.id)
            return None
        # As Job.perform does: a job with a time to live must not expire while it runs, nor as soon as it has failed.
        self.connection.persist(rq_job.key)
        refusal = refusal_of(rq_job, self._callbacks.allowed if self._callbacks else ())
        job = None if refusal else read_job(rq_job)
        if job is None:
            reason = refusal or "Its parameters are not those of a svdq job."
            logger.error("Job %s was refused: %s", rq_job.id, reason)
            self._fail(rq_job, queue, None, f"Refused: {reason} Nothing was run; enqueue with `svdq submit`.")
            handover.drop_popped(self.connection, queue, rq_job.id)
            return None
        if self.was_cancelled(rq_job.id):  # while it was on its way between a group and the queue
            self._stopped_job_id = rq_job.id
            self.fail_popped(rq_job, queue, STOPPED)
            return None
        rq_job.origin = queue.name  # where it was found counts: RQ's registries go by it
        # What RQ does in `prepare_execution` and `prepare_job_execution`, in one step.
        with self.connection.pipeline() as pipeline:
            pipeline.hset(rq_job.key, "origin", queue.name)
            execution = Execution.create(rq_job, LEASE_S, pipeline=pipeline, worker_name=self.name)
            rq_job.prepare_for_execution(self.name, pipeline=pipeline)
            handover.drop_popped(pipeline, queue, rq_job.id)
            self.set_state(WorkerStatus.BUSY, pipeline=pipeline)
            pipeline.execute()
        return Flight(rq_job=rq_job, queue=queue, execution=execution, job=job)

    def was_cancelled(self, job_id: str) -> bool:
        """Whether the user wants a job stopped that a group has."""
        return bool(self.connection.sismember(keys.CANCELLED, job_id))

    def mark_cancelled(self, job_id: str) -> None:
        """Have the ranks know that a job is to stop at its next step."""
        self.connection.sadd(keys.CANCELLED, job_id)

    def pause(self, reason: str) -> None:
        """Take no more jobs until the user resumes."""
        self.connection.hset(keys.PAUSES, self.name, reason)

    def put_back(self, flights: Iterable[Flight]) -> None:
        """Give jobs back to the front of their queues, in their old order, spending none of their retries."""
        for flight in sorted(flights, key=lambda flight: flight.execution.created_at, reverse=True):
            handover.give_back(self.connection, flight.queue, flight.execution)
