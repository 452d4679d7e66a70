"""Ends executions of RQ jobs as RQ's tools expect it; a kill at any point loses no job.

The base of `group_worker`, written against rq 2.12. It imports and calls nothing that a job names.
"""

import logging
from dataclasses import dataclass
from typing import Any

import redis
import rq
from rq.executions import Execution
from rq.job import JobStatus
from rq.utils import now

from svdq.producer import keys
from svdq.producer.job import Job
from svdq.producer.untrusted_job import UntrustedJob
from svdq.worker.queue import transitions
from svdq.worker.queue.rq_worker import RqWorker

logger = logging.getLogger(__name__)

#: The reason of a job that was canceled in flight.
STOPPED = "Stopped by the user."
#: States of a job after its execution.
_ENDED = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED)


@dataclass(frozen=True, kw_only=True)
class ActiveJob:
    """A job that this worker holds, with its execution."""

    #: RQ's job.
    rq_job: rq.job.Job
    #: The queue it came from.
    queue: rq.Queue
    #: RQ's record of this execution.
    execution: Execution
    #: The video to make.
    job: Job


class CompletionWorker(RqWorker):
    """An RQ worker that ends jobs in any order."""

    def __init__(self, connection: redis.Redis, **handlers: Any) -> None:
        """Make the worker; nothing is registered yet. The arguments are those of `RqWorker`."""
        super().__init__(connection, **handlers)
        #: The job whose success is being written, and whether RQ has tried before.
        self._succeeding: ActiveJob | None = None
        self._tried = False
        #: Whether the failure that is being written is a stop by the user.
        self._is_stop = False

    def fail_popped(self, rq_job: rq.job.Job, queue: rq.Queue, reason: str) -> None:
        """End a popped job as failed that was not begun."""
        self._fail(rq_job, queue, None, reason)
        transitions.drop_popped(self.connection, queue, rq_job.id)

    def succeed(self, active: ActiveJob, result: dict[str, Any]) -> None:
        """End a job as finished, with its result."""
        rq_job = active.rq_job
        rq_job.ended_at = now()
        rq_job._result = result
        rq_job._status = JobStatus.FINISHED
        self.execution = active.execution
        self._succeeding, self._tried = active, False
        try:
            self.handle_job_success(rq_job, active.queue, active.queue.started_job_registry)
        finally:
            self.execution = self._succeeding = None
        self._clear_marks(rq_job.id)

    def increment_successful_job_count(self, pipeline: Any = None) -> None:
        """Do RQ's first write of a success, unless the success is already written.

        RQ tries again after a conflict, and also after a lost connection, although Redis may have written everything.
        Before that it resets its execution.
        """
        active = self._succeeding
        if active is not None:
            if self._tried and not self.holds_lease(active):
                raise redis.ConnectionError("the connection was lost while a success was written")
            self.execution, self._tried = active.execution, True
        super().increment_successful_job_count(pipeline)

    def increment_failed_job_count(self, pipeline: Any = None) -> None:
        """Count a failed job; RQ also counts one that the user stopped."""
        if not self._is_stop:
            super().increment_failed_job_count(pipeline)

    def confirm_end(self, active: ActiveJob) -> JobStatus | None:
        """Complete the end of an execution if Redis has written it without confirming it.

        Returns:
            The state of the job; None if this execution has not ended it.
        """
        rq_job = UntrustedJob.find(active.rq_job.id, self.connection)
        result = rq_job.latest_result() if rq_job is not None else None
        if rq_job is None or result is None or result.execution_id != active.execution.id:
            return None
        status = rq_job.get_status(refresh=False)
        if status not in _ENDED:
            return None
        self._clear_marks(rq_job.id)
        return status

    def is_wanted(self, job_id: str) -> bool:
        """Return whether a job exists and has not ended."""
        rq_job = UntrustedJob.find(job_id, self.connection)
        return rq_job is not None and rq_job.get_status(refresh=False) not in (*_ENDED, JobStatus.CANCELED)

    def fail(self, active: ActiveJob, reason: str) -> None:
        """End a job as failed; RQ's Retry is not used, since the same seed would fail again."""
        self._fail(active.rq_job, active.queue, active.execution, reason)
        if self.holds_lease(active):
            raise redis.ConnectionError("RQ could not write that a job failed")  # RQ only logs it

    def stop(self, active: ActiveJob) -> None:
        """End a job as stopped by the user."""
        now_s = transitions.server_time(self.connection)
        with self.connection.pipeline() as pipeline:
            # Before the end, so that no kill leaves it out; ids of jobs in other states are skipped.
            pipeline.zadd(keys.STOPPED, {active.rq_job.id: now_s + keys.FAILURE_TTL_S})
            pipeline.zremrangebyscore(keys.STOPPED, "-inf", now_s)
            pipeline.execute()
        self._stopped_job_id = active.rq_job.id
        self.fail(active, STOPPED)

    def _fail(self, rq_job: rq.job.Job, queue: rq.Queue, execution: Execution | None, reason: str) -> None:
        rq_job.ended_at = now()
        rq_job.retries_left = None
        self.execution = execution
        self._is_stop = self._stopped_job_id == rq_job.id
        try:
            self.handle_job_failure(rq_job, queue, queue.started_job_registry, exc_string=reason)
        finally:
            self.execution = None
            self._is_stop = False
        self._clear_marks(rq_job.id)

    def _clear_marks(self, job_id: str) -> None:
        with self.connection.pipeline() as pipeline:
            pipeline.srem(keys.CANCELED, job_id)
            pipeline.hdel(keys.CRASHES, job_id)
            pipeline.execute()

    def holds_lease(self, active: ActiveJob) -> bool:
        """Return whether this worker still holds a job: a group that slept past its lease has lost it."""
        registry = active.queue.started_job_registry
        return self.connection.zscore(registry.key, active.execution.composite_key) is not None
