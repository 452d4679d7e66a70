"""Reports to RQ how the executions of a group ended, and renews the leases of the others. Bookkeeping thread only."""

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping

import redis
from rq.job import JobStatus

from svdq.pipeline.loop.protocols import Report
from svdq.worker.health.rank_status import Pace
from svdq.worker.intake.policy import LENGTH, CircuitBreaker
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.rq_worker import ActiveJob

logger = logging.getLogger(__name__)


class Reporter:
    """Writes to Redis what happens to the active jobs of a group."""

    def __init__(
        self,
        worker: GroupWorker,
        active_jobs: Mapping[str, ActiveJob],
        *,
        on_ended: Callable[[ActiveJob, bool], None],
        on_released: Callable[[ActiveJob], object],
    ) -> None:
        """Make it; it never changes `active_jobs`.

        It calls `on_ended` when the end of a job is written, with whether it is finished, and `on_released` when a job
        is no longer active, for whatever reason.
        """
        self._worker = worker
        self._active_jobs = active_jobs
        self._on_ended = on_ended
        self._on_released = on_released
        #: Ends that are not in Redis yet.
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        #: Executions that this group has lost, whose samples are still in flight.
        self._lost: set[str] = set()
        self._breaker = CircuitBreaker()
        #: How fast videos are finished, and how many jobs have ended so far.
        self.pace = Pace()
        self.num_finished = self.num_failed = 0

    def add(self, report: Report) -> None:
        """Queue the report of a sample that has ended; from any thread."""
        self._reports.put(report)

    def renew_leases(self) -> None:
        """Renew the leases of the active jobs, except those that this group has lost."""
        ours = [active for active in self._active_jobs.values() if active.execution.id not in self._lost]
        for active in self._worker.renew_leases(ours):
            self._lost.add(active.execution.id)
            logger.warning("Job %s was canceled or taken over; this group drops it.", active.rq_job.id)

    def cancel(self, job_id: str) -> None:
        """Make an active job stop at its next step: RQ's stop command."""
        if job_id in self._active_jobs:
            self._worker.mark_canceled(job_id)
        else:
            logger.warning("Job %s cannot be stopped here: it is not in flight in this group.", job_id)

    def finish_all(self) -> None:
        """Write to Redis what has ended.

        Raises:
            redis.RedisError: Redis does not answer; the reports that are not written are kept.
        """
        while not self._reports.empty():
            report = self._reports.get()
            active = self._active_jobs.get(report.job_id)
            if active is None or not _is_of(report, active):
                continue  # of a lost execution; the same job may be active again
            try:
                self._finish(active, report)
            except redis.RedisError as error:
                if not (isinstance(error, redis.ResponseError) and self._worker.is_spoiled(active)):
                    self._reports.put(report)  # tried again when Redis is back
                    raise
                logger.error("The end of job %s cannot be written: another program changed its keys.", report.job_id)
                self._worker.forget(active)
            except BaseException:
                self._on_released(active)  # recovered after its lease
                raise
            self._on_released(active)
            self._lost.discard(active.execution.id)
            if not self._active_jobs:
                self.pace.idle()

    def _finish(self, active: ActiveJob, report: Report) -> None:
        job_id = report.job_id
        if not self._worker.holds_lease(active):
            self._let_go(active, report)
        elif _is_dropped(report) and not self._worker.was_canceled(job_id):
            self._worker.return_to_queue([active])  # a rank dropped it as lost, wrongly
        elif _is_dropped(report):
            logger.info("Job %s was stopped by the user.", job_id)
            self._worker.stop(active)
            self._on_ended(active, False)
        elif report.failure is not None:
            logger.error("Job %s failed: %s", job_id, report.failure)
            self._worker.fail(active, report.failure)
            self._failed(active, report)
        else:
            logger.info("Job %s finished: %s", job_id, ", ".join(report.result["outputs"]))
            self._worker.succeed(active, dict(report.result))
            self._finished(active, report)

    def _let_go(self, active: ActiveJob, report: Report) -> None:
        """Drop an execution that this group no longer holds: its end is already written, or it was taken over."""
        job_id = report.job_id
        status = self._worker.confirm_end(active)
        if status is JobStatus.FINISHED:
            self._finished(active, report)
        elif status is JobStatus.FAILED:
            self._failed(active, report)
        elif status is JobStatus.STOPPED:
            self._on_ended(active, False)
        else:
            logger.warning("Job %s was canceled or taken over by another group; its result here is dropped.", job_id)
            if not self._worker.is_wanted(job_id):
                self._on_ended(active, False)
        self._worker.forget(active)

    def _finished(self, active: ActiveJob, report: Report) -> None:
        self.num_finished += 1
        self._on_ended(active, True)
        self._breaker.record_success()
        if report.body:  # without one its files were there already
            parameters = report.body["parameters"]
            size = math.prod(parameters[name] for name in ("frames", "width", "height", "steps"))
            self.pace.finished(time.monotonic(), size)

    def _failed(self, active: ActiveJob, report: Report) -> None:
        self.num_failed += 1
        self._on_ended(active, False)
        # One that has not reached a rank was refused, or has a bad photo, which concerns only its job.
        counts = bool(report.body) or report.refused
        if counts and report.failure is not None and self._breaker.record_failure(report.job_id, report.failure):
            self._pause(report.failure)

    def _pause(self, failure: str) -> None:
        reason = f"{LENGTH} different jobs in a row failed in the same way, the last one with: {failure}"
        logger.error("INTAKE IS PAUSED. %s Fix the cause, then run `svdq resume` and `svdq retry --failed`.", reason)
        self._worker.pause(reason)


def _is_dropped(report: Report) -> bool:
    """Whether a rank dropped a sample: it was canceled, or seemed to belong to another group."""
    return report.canceled or not (report.result or report.failure)


def _is_of(report: Report, active: ActiveJob) -> bool:
    """Whether a report belongs to this execution of its job; that of a job that did not reach the stage does."""
    return not report.body or report.body["job"]["execution"][1] == active.execution.composite_key
