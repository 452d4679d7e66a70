"""Owns the active jobs of a group: renews their leases, and writes to RQ how they end.

The bookkeeping thread takes and ends jobs; another one renews their leases beside it.
"""

import logging
import queue
import re
import threading
import time
from collections import deque

import redis
from rq.job import JobStatus

from svdq.pipeline.loop.protocols import Report
from svdq.producer.queue import ENDED, statuses
from svdq.worker.active_job import ActiveJob
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.health.rank_status import Pace
from svdq.worker.queue import scripts
from svdq.worker.queue.group_worker import GroupWorker

logger = logging.getLogger(__name__)

NUM_ALIKE = 3  # different jobs in a row that fail alike before the group takes no more

_ID = re.compile(r"\b(?=\w*\d)[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


class CircuitBreaker:
    """Counts different jobs in a row that fail with the same kind of reason."""

    def __init__(self) -> None:
        self._kind = ""
        self._job_ids: set[str] = set()

    def record_success(self) -> None:
        """Forget the failures: a job succeeded."""
        self._job_ids.clear()

    def record_failure(self, job_id: str, reason: str) -> bool:
        """Count a failed job; return whether the limit is reached, which also resets the count."""
        kind = _NUMBER.sub("#", _ID.sub("#", reason))
        if kind != self._kind:
            self._job_ids.clear()
        self._kind = kind
        self._job_ids.add(job_id)
        if len(self._job_ids) < NUM_ALIKE:
            return False
        self._job_ids.clear()
        return True


class Reporter:
    """The active jobs of a group, each from when it is taken until its end is in Redis."""

    def __init__(self, worker: GroupWorker, checkpoints: Checkpoints | None, wake: threading.Event) -> None:
        """Begin without jobs; `wake` is set when there is a report to write."""
        self._worker = worker
        self._checkpoints = checkpoints
        self._wake = wake
        self.active: dict[str, ActiveJob] = {}  # executions by job id
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()  # ends that are not in Redis yet
        self._ending: set[str] = set()  # executions whose ends are being written
        self._lost: set[str] = set()  # executions that this group has lost, whose samples are still in flight
        self._breaker = CircuitBreaker()
        #: How fast videos are finished, and how many jobs have ended so far.
        self.pace = Pace()
        self.num_finished = self.num_failed = 0

    @property
    def execution_ids(self) -> set[str]:
        """The executions of the active jobs."""
        return {active.execution.id for active in self.active.values()}

    def is_lost(self, active: ActiveJob) -> bool:
        """Whether this group was seen to have lost a job."""
        return active.execution.id in self._lost

    def take(self, active: ActiveJob) -> None:
        """Own a job from now on."""
        self.active[active.id] = active

    def add(self, report: Report) -> None:
        """Queue the report of a job that has ended; from any thread."""
        self._reports.put(report)
        self._wake.set()

    def renew_leases(self, connection: redis.Redis) -> None:
        """Renew the leases of the active jobs, except those that this group has lost; in the thread of `connection`."""
        ours = [active for active in list(self.active.values()) if active.execution.id not in self._lost]
        for active in self._worker.renew_leases(ours, connection):
            if self.active.get(active.id) is not active or active.execution.id in self._ending:
                continue  # its end was written meanwhile
            self._lost.add(active.execution.id)
            logger.warning("Job %s was canceled or taken over; this group drops it.", active.id)
            self._worker.forget(active, connection)

    def cancel(self, job_id: str, execution_id: str) -> None:
        """Make an active job stop at its next step, if it is in this execution or that is ""; RQ's stop commands."""
        active = self.active.get(job_id)
        if active is not None and execution_id in ("", active.execution.id):
            self._worker.mark_canceled(job_id)
        else:
            logger.warning("Job %s cannot be stopped here: it is not in flight in this group.", job_id)

    def write_ends(self) -> None:
        """Write to Redis what has ended; keeps what it has not written when it raises redis.RedisError."""
        ends: deque[tuple[ActiveJob, Report]] = deque()
        while not self._reports.empty():
            report = self._reports.get()
            active = self.active.get(report.job_id)
            if active is not None and not _is_of_another(report, active):  # the same job may be active again
                ends.append((active, report))
        self._ending = {active.execution.id for active, _ in ends}
        try:
            successes = [(active, dict(report.result)) for active, report in ends if _is_success(report)]
            answers = self._worker.finish(successes) if successes else []
            outcomes = {active.id: answer for (active, _), answer in zip(successes, answers, strict=True)}
            while ends:
                active, report = ends[0]
                self._end(active, report, outcomes.get(report.job_id))
                ends.popleft()
        finally:
            for _, report in ends:  # tried again when Redis is back
                self._reports.put(report)
            self._ending = set()

    def _end(self, active: ActiveJob, report: Report, outcome: bool | redis.ResponseError | None) -> None:
        try:
            if isinstance(outcome, redis.ResponseError):
                raise outcome
            self._write_end(active, report, is_finished=outcome)
        except redis.RedisError as error:
            if not scripts.is_wrong_type(error):
                raise
            logger.error("The end of job %s cannot be written: another program changed its keys.", report.job_id)
            self._worker.forget(active)
        except Exception:
            logger.exception("The end of job %s cannot be written; it is taken again later.", report.job_id)
        del self.active[report.job_id]
        self._lost.discard(active.execution.id)
        if not self.active:
            self.pace.idle()

    def _write_end(self, active: ActiveJob, report: Report, *, is_finished: bool | None) -> None:
        """Write an end, or count one that is written; `is_finished` is None unless the job has succeeded."""
        job_id = report.job_id
        if is_finished:
            logger.info("Job %s finished: %s", job_id, ", ".join(report.result["outputs"]))
            self._finished(report)
        elif is_finished is not None or not self._worker.holds_lease(active):
            self._let_go(active, report)
        elif _is_dropped(report) and not self._worker.was_canceled(job_id):
            self._worker.return_to_queue([active])  # a rank dropped it as lost, wrongly
        elif _is_dropped(report):
            if self._worker.stop(active):
                logger.info("Job %s was stopped by the user.", job_id)
                self._stopped(report)
            else:
                self._let_go(active, report)
        elif self._worker.fail(active, report.failure or ""):
            logger.error("Job %s failed: %s", job_id, report.failure)
            self._failed(report)
        else:
            self._let_go(active, report)

    def _let_go(self, active: ActiveJob, report: Report) -> None:
        """Drop an execution that this group no longer holds: its end is already written, or it was taken over."""
        status = self._worker.confirm_end(active)
        if status is JobStatus.FINISHED:
            self._finished(report)
        elif status is JobStatus.FAILED:
            self._failed(report)
        elif status is JobStatus.STOPPED:
            self._stopped(report)
        else:
            if not self.is_lost(active):  # else it was said
                logger.warning(
                    "Job %s was canceled or taken over by another group; its result here is dropped.", report.job_id
                )
                self._lost.add(active.execution.id)  # said once, also while Redis refuses to forget it
            [found] = statuses(self._worker.connection, [report.job_id])
            if found in (None, *ENDED):
                self._stopped(report)
        self._worker.forget(active)

    def _finished(self, report: Report) -> None:
        self._stopped(report)
        self.num_finished += 1
        self._breaker.record_success()
        if report.body:  # without one its files were there already
            self.pace.finished(time.monotonic())

    def _failed(self, report: Report) -> None:
        self._stopped(report)
        self.num_failed += 1
        # One that has not reached a rank was refused, or has a bad photo, which concerns only its job.
        counts = bool(report.body) or report.refused
        if counts and report.failure is not None and self._breaker.record_failure(report.job_id, report.failure):
            reason = f"{NUM_ALIKE} different jobs in a row failed in the same way, the last one with: {report.failure}"
            logger.error(
                "INTAKE IS PAUSED. %s Fix the cause, then run `svdq resume` and `svdq retry --failed`.", reason
            )
            self._worker.pause(reason)

    def _stopped(self, report: Report) -> None:
        if self._checkpoints is not None:
            self._checkpoints.forget(report.job_id)


def _is_success(report: Report) -> bool:
    return bool(report.result) and report.failure is None


def _is_of_another(report: Report, active: ActiveJob) -> bool:
    """Whether a report is of an execution that this group has lost, and not of the present one."""
    return bool(report.body) and report.body["job"]["execution"][1] != active.execution.composite_key


def _is_dropped(report: Report) -> bool:
    """Whether a rank dropped a sample: it was canceled, or seemed to belong to another group."""
    return report.canceled or not (report.result or report.failure)
