"""Rank 0's source: takes jobs off the queue while earlier ones are in flight, and reports how they ended.

All contact with Redis stands in one bookkeeping thread with its own connection; the stage loop only ever waits for a
job that is not there yet. Photos are loaded by another thread, ahead of need.
"""

import contextlib
import logging
import queue
import threading
import time

import redis

from svdq.pipeline.models.base import ModelInfo
from svdq.pipeline.protocols import Report, Request
from svdq.producer.queue import ENDED, statuses
from svdq.producer.status.ranks import Condition, IntakeStatus
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.reader import CheckpointReader
from svdq.worker.checkpoint.writer import CheckpointWriter
from svdq.worker.intake.dispatcher import Dispatcher, IntakeOptions
from svdq.worker.intake.prefetcher import Prefetcher
from svdq.worker.intake.reporter import Reporter
from svdq.worker.queue.job_completion import ActiveJob
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_adapter import GroupWorker
from svdq.worker.queue.rq_worker import BEAT_S, MAINTENANCE_S
from svdq.worker.redis_client import RETRY_S, ConnectionHealth

logger = logging.getLogger(__name__)

#: Seconds between looks at an empty queue: the first job after an idle night starts at once, for 0.1% of a core.
POLL_S = 0.1
#: Seconds between looks for jobs that are due; RQ's times are whole seconds.
DUE_S = 1.0
#: Seconds between looks for checkpoints of jobs that have ended: a slow rank may write one after its job's end.
SWEEP_S = 3600.0
#: Seconds that a group which is told to stop waits for Redis.
GIVE_UP_S = 5.0


class Intake:
    """The source of a group of ranks."""

    def __init__(
        self,
        connection: redis.Redis,
        storage: Storage,
        model: ModelInfo,
        options: IntakeOptions,
        checkpoint_reader: CheckpointReader | None = None,
        checkpoint_writer: CheckpointWriter | None = None,
        connection_health: ConnectionHealth | None = None,
    ) -> None:
        """Make it; Redis must answer, and nothing is taken yet.

        Args:
            connection: of the bookkeeping thread's own.
            storage: where photos and videos are.
            model: what videos are made with.
            options: how jobs are taken.
            checkpoint_reader: where checkpoints are found; None where there are none.
            checkpoint_writer: what removes them when jobs have ended.
            connection_health: records whether Redis answers.
        """
        self._options = options
        self._checkpoint_reader = checkpoint_reader
        self._checkpoint_writer = checkpoint_writer
        self._connection_health = connection_health or ConnectionHealth()
        self._worker = GroupWorker(connection, on_stop=self._stop_job, on_shutdown=self.drain)
        self._recovery = Recovery(self._worker, options.max_attempts)
        self._reporter = Reporter(self._worker, on_ended=self._forget)
        self._wake = threading.Event()
        self._prefetcher = Prefetcher(
            storage, model, options.max_pixels, checkpoint_reader, options.memory, mark=options.mark_prepare
        )
        self._dispatcher = Dispatcher(
            self._worker,
            self._reporter,
            self._prefetcher,
            options,
            checkpoint_reader,
            self._wake,
            self._take_back_unknown,
        )
        #: How many requests the stage has taken, or waits for, and how many it wants by now: both written by it alone.
        self._num_taken = self._num_wanted = 0
        #: Jobs that RQ's stop command names.
        self._stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: Whether the group has shown up in Redis and taken back what its dead predecessors had.
        self._begun = False
        self._beat_at = self._due_at = self._maintain_at = self._sweep_at = 0.0
        self._closing = threading.Event()
        #: When to stop waiting for Redis at the end.
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="bookkeeping", daemon=True)

    def start(self) -> None:
        """Begin to show up in Redis, take back what dead groups had, and take jobs."""
        self._thread.start()

    # Called by the stage loop.

    def take(self) -> Request | None:
        """Wait for the next video to make; None when no more will come."""
        self._num_taken += 1
        self._want(self._num_taken)
        return self._dispatcher.ready.get()

    def prefetch_next(self) -> None:
        """Have the next job ready: rank 0 can start it in about a step's time."""
        self._want(self._num_taken + 1)

    def _want(self, number: int) -> None:
        self._num_wanted = number
        self._wake.set()

    # Called from other threads.

    def status(self) -> IntakeStatus:
        """Tell how the group stands, as far as it is known here."""
        return IntakeStatus(
            worker=self._worker.name,
            in_flight=tuple(self._reporter.active_jobs),
            finished=self._reporter.num_finished,
            failed=self._reporter.num_failed,
            pace_s=self._reporter.pace.seconds,
            draining=self._dispatcher.draining.is_set(),
            taken_back=self._recovery.num_taken_back,
        )

    @property
    def condition(self) -> Condition | None:
        """Why no video can be begun at present."""
        return self._prefetcher.condition

    def ended(self, report: Report) -> None:
        """Take note of how a sample ended, and of what it took."""
        self._reporter.add(report)
        self._wake.set()
        if self._options.memory is not None:
            self._options.memory.learn(report.body)

    def drain(self) -> None:
        """Take no more jobs; those in flight are finished."""
        self._dispatcher.draining.set()
        self._wake.set()

    def stop(self) -> None:
        """Let a `take` that waits return, whatever its job is waiting for: the rank stops."""
        self.drain()
        self._dispatcher.ready.put(None)

    def close(self, *, return_to_queue: bool) -> None:
        """Report what has ended, give the rest back to the queue if asked to, and leave Redis."""
        if return_to_queue:
            self._give_up_at = time.monotonic() + GIVE_UP_S
        self._closing.set()
        self._wake.set()
        self._thread.join()
        try:
            if return_to_queue:
                self._worker.return_to_queue(self._reporter.active_jobs.values())
                logger.info("Stopped; %s went back to the queue.", _jobs(len(self._reporter.active_jobs)))
            else:
                self._sweep()
            self._worker.end()
        except redis.RedisError as error:
            logger.warning("Redis does not answer (%s); jobs in flight are taken again after their lease.", error)
        self._dispatcher.close()

    def _stop_job(self, job_id: str) -> None:
        self._stops.put(job_id)
        self._wake.set()

    # The bookkeeping thread.

    def _run(self) -> None:
        while True:
            # Looked at first: what ended before the group was closed is written in the round that follows.
            closing = self._closing.is_set()
            try:
                self._round(closing=closing)
                self._connection_health.succeeded()
                if closing:
                    return
            except redis.RedisError as error:
                self._connection_health.failed(error)
                self._recovery.forget_leases()
                if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                    return
                time.sleep(RETRY_S)
            except Exception:
                # A mistake of ours with one job: the leases of the others must not run out for it.
                logger.exception("The bookkeeping failed; it goes on.")
                time.sleep(RETRY_S)
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _round(self, *, closing: bool) -> None:
        if not self._begun:
            self._worker.start()
            self._recovery.at_start(self._options.suspects)
            self._sweep()
            self._sweep_at = time.monotonic() + SWEEP_S
            self._begun = True
        # Leases first: nothing below may keep one from being prolonged.
        if time.monotonic() >= self._beat_at:
            self._reporter.renew_leases()
            self._beat_at = time.monotonic() + BEAT_S
        while not self._stops.empty():
            self._reporter.cancel(self._stops.get())
        self._reporter.finish_all()
        if closing:
            return
        if time.monotonic() >= self._due_at:
            more = self._worker.promote_due()
            self._due_at = time.monotonic() + (0.0 if more else DUE_S)
        self._dispatcher.fill(self._num_wanted)
        if time.monotonic() >= self._maintain_at:
            self._take_back_unknown()
            self._recovery.expired()
            self._worker.maintain()
            self._maintain_at = time.monotonic() + MAINTENANCE_S
        if time.monotonic() >= self._sweep_at:
            # A thread of its own: a bucket takes longer to list than leases can wait.
            threading.Thread(target=self._sweep_if_redis_answers, name="sweep", daemon=True).start()
            self._sweep_at = time.monotonic() + SWEEP_S

    def _take_back_unknown(self) -> None:
        self._recovery.unknown({active.execution.id for active in self._reporter.active_jobs.values()})

    def _forget(self, active: ActiveJob, finished: bool) -> None:
        """Remove the checkpoints of a job that has ended."""
        self._dispatcher.ended(active, finished)
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.forget(active.rq_job.id)

    def _sweep_if_redis_answers(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self._sweep()

    def _sweep(self) -> None:
        """Remove the checkpoints of jobs that ended while nobody was there to remove them."""
        if self._checkpoint_reader is not None:
            self._checkpoint_reader.sweep(self._which_ended)

    def _which_ended(self, job_ids: list[str]) -> dict[str, bool]:
        """Say of jobs whether they have ended; jobs that are not there are left out."""
        found = zip(job_ids, statuses(self._worker.connection, job_ids), strict=True)
        return {job_id: status in ENDED for job_id, status in found if status is not None}


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
