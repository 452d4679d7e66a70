"""Reports to RQ how the executions of a group ended, and keeps those that have not. Bookkeeping thread only."""

import logging
import queue
import time
from collections.abc import Callable

import redis
from rq.job import JobStatus

from svdq.pipeline.protocols import Report
from svdq.worker.health.histograms import Pace
from svdq.worker.intake.circuit_breaker import LENGTH, CircuitBreaker
from svdq.worker.output.fence import execution_of
from svdq.worker.queue.job_completion import ActiveJob
from svdq.worker.queue.rq_adapter import GroupWorker

logger = logging.getLogger(__name__)


class Reporter:
    """What a group has in flight, and what of it has ended."""

    def __init__(self, worker: GroupWorker, on_ended: Callable[[ActiveJob, bool], None]) -> None:
        """Make it.

        Args:
            worker: writes to Redis.
            on_ended: called when the end of a job is written, with whether it is finished.
        """
        self._worker = worker
        self._on_ended = on_ended
        #: Executions by job id; whoever takes a job adds to it, and what has ended is removed here.
        self.active_jobs: dict[str, ActiveJob] = {}
        #: Ends that are not in Redis yet.
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        #: Executions that are not ours any more, whose samples are still on their way.
        self._lost: set[str] = set()
        self._breaker = CircuitBreaker()
        #: How fast videos are finished, and how many jobs have ended so far.
        self.pace = Pace()
        self.num_finished = self.num_failed = 0

    def add(self, report: Report) -> None:
        """Take note of how a sample ended; from any thread."""
        self._reports.put(report)

    def renew_leases(self) -> None:
        """Prolong what is still ours."""
        ours = [active for active in self.active_jobs.values() if active.execution.id not in self._lost]
        for active in self._worker.renew_leases(ours):
            self._lost.add(active.execution.id)
            logger.warning("Job %s is not ours any more: it was canceled, or taken over.", active.rq_job.id)

    def cancel(self, job_id: str) -> None:
        """Have a job in flight stop at its next step: RQ's stop command."""
        if job_id in self.active_jobs:
            self._worker.mark_canceled(job_id)
        else:
            logger.warning("Job %s was asked to stop, but is not in flight here.", job_id)

    def finish_all(self) -> None:
        """Write to Redis what has ended.

        Raises:
            redis.RedisError: it does not answer; what is not written is kept.
        """
        while not self._reports.empty():
            report = self._reports.get()
            active = self.active_jobs.get(report.job_id)
            if active is None or not _is_of(report, active):
                continue  # an execution that was lost, while the same job was perhaps taken anew
            try:
                self._finish(active, report)
            except redis.RedisError:
                self._reports.put(report)  # tried again when Redis is back
                raise
            except BaseException:
                del self.active_jobs[report.job_id]  # recovered after its lease
                raise
            del self.active_jobs[report.job_id]
            self._lost.discard(active.execution.id)
            if not self.active_jobs:
                self.pace.idle()

    def _finish(self, active: ActiveJob, report: Report) -> None:
        job_id = report.job_id
        if not self._worker.holds_lease(active):
            self._let_go(active, report)
        elif _is_dropped(report) and not self._worker.was_canceled(job_id):
            self._worker.return_to_queue([active])  # what made a rank believe that it was lost has passed
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
        """Leave an execution that is not ours any more: its end is written already, or it was taken away."""
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
            self.pace.finished(time.monotonic())

    def _failed(self, active: ActiveJob, report: Report) -> None:
        self.num_failed += 1
        self._on_ended(active, False)
        # Without a body it has not come to a rank: a bad photo is the fault of its job alone.
        if report.body and report.failure is not None and self._breaker.record_failure(report.job_id, report.failure):
            self._pause(report.failure)

    def _pause(self, failure: str) -> None:
        reason = f"{LENGTH} different jobs in a row failed in the same way, the last one so: {failure}"
        logger.error("INTAKE IS PAUSED. %s Mend it, then `svdq resume` and `svdq retry --failed`.", reason)
        self._worker.pause(reason)


def _is_dropped(report: Report) -> bool:
    """Whether a rank has let a sample go: because it was canceled, or seemed to be another group's."""
    return report.canceled or not (report.result or report.failure)


def _is_of(report: Report, active: ActiveJob) -> bool:
    """Whether a report is of this execution of its job; one that names no execution is."""
    execution = execution_of(report.body.get("metadata", {}))
    return execution is None or execution[1] == active.execution.composite_key
