"""Rank 0's source: takes jobs while earlier ones are in flight, and reports their ends.

One bookkeeping thread with its own connection talks to Redis; the stage loop only waits for a request. Other threads
renew the leases, and load photos in advance.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import redis

from svdq.pipeline.loop.protocols import Report, Request, Source
from svdq.pipeline.models.video_model import ModelInfo
from svdq.producer import keys
from svdq.producer.queue import ENDED, statuses
from svdq.producer.status.ranks import Condition, IntakeStatus
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count
from svdq.worker.ability import Ability
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.intake.dispatcher import Dispatcher
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher
from svdq.worker.intake.reporter import Reporter
from svdq.worker.outages import RETRY_S, ConnectionHealth
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_worker import BEAT_S, MAINTENANCE_S

logger = logging.getLogger(__name__)


class LeaseThread:
    """Calls `renew` in each beat, with a connection that nothing else uses."""

    def __init__(
        self, connection: redis.Redis, renew: Callable[[redis.Redis], object], connection_health: ConnectionHealth
    ) -> None:
        """Renew nothing before `start`."""
        self._connection = connection
        self._renew = renew
        self._connection_health = connection_health
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Renew the leases from now on."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Renew no more; wait for the present renewal, which would register a worker again that has ended."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            wait_s = RETRY_S
            try:
                self._renew(self._connection)
                self._connection_health.succeeded()
                wait_s = BEAT_S
            except redis.RedisError as error:
                self._connection_health.failed(error)
            except Exception:
                logger.exception("The leases could not be renewed; it is tried again.")


#: Seconds between two polls of an empty queue, at first and after a minute without a job; and between two rounds of
#: a group that wants no job. Hundreds of groups share one Redis.
POLL_S, SLOW_POLL_S = 0.1, 1.0
SLOW_AFTER_S = 60.0
CLEAN_UP_S = 10.0  # seconds between two removals of what has expired
DUE_S = 1.0  # seconds between two searches for jobs that are due; RQ's times are whole seconds
SWEEP_S = 3600.0  # between searches for checkpoints of ended jobs: slow ranks write late
GIVE_UP_S = 5.0  # seconds that a group which stops waits for Redis


class Intake(Source):
    """The source of a group of ranks."""

    def __init__(
        self,
        connection: redis.Redis,
        storage: Storage,
        model: ModelInfo,
        options: IntakeOptions,
        checkpoints: Checkpoints | None = None,
        connection_health: ConnectionHealth | None = None,
        lease_connection: redis.Redis | None = None,
    ) -> None:
        """Take no job before `start`; Redis must answer.

        `connection` is for the bookkeeping thread alone, `lease_connection` for the one that renews leases.
        """
        self._options = options
        self._checkpoints = checkpoints
        self._connection_health = connection_health or ConnectionHealth()
        self._worker = GroupWorker(
            connection,
            is_burst=options.burst,
            ability=Ability.of(model, options.memory, upscales=options.upscales),
            gpus=[rank.gpu for rank in options.memory.ranks if rank.gpu],
            loras=options.loras,
            wait_for_able=options.wait_for_able,
            max_attempts=options.max_attempts,
        )
        self._recovery = Recovery(self._worker)
        self._wake = threading.Event()
        self._reporter = Reporter(self._worker, checkpoints, self._wake)
        self._prefetcher = Prefetcher(storage, model, options, checkpoints)
        self._dispatcher = Dispatcher(
            self._worker, self._reporter, self._recovery, self._prefetcher, options, checkpoints, self._wake
        )
        self._leases = LeaseThread(lease_connection or connection, self._reporter.renew_leases, self._connection_health)
        self._num_taken = 0  # number of requests that the stage has taken or waits for; it alone writes it
        self._given_at: float | None = None  # when the stage got its last request
        #: Whether the group is registered in Redis and has taken back the jobs of its dead predecessors.
        self._begun = False
        self._look_at = self._due_at = self._maintain_at = self._clean_up_at = self._sweep_at = 0.0
        self._busy_at = time.monotonic()  # when jobs were last in flight
        self._closing = threading.Event()
        self._give_up_at: float | None = None  # when to stop waiting for Redis at the end
        self._thread = threading.Thread(target=self._run, name="bookkeeping", daemon=True)

    def start(self) -> None:
        """Register in Redis, take back the jobs of dead groups, and begin to take jobs, in a thread."""
        self._thread.start()

    # Called by the thread that admits.

    def take(self) -> Request | None:
        """Wait for the next request; None when no more will come."""
        if self._given_at is not None:
            self._dispatcher.wanted(time.monotonic() - self._given_at)
        self._num_taken += 1
        self._wake.set()
        request = self._dispatcher.ready.get()
        self._given_at = time.monotonic()
        return request

    @property
    def lead_s(self) -> float:
        return self._dispatcher.lead_s

    # Called from other threads.

    def status(self) -> IntakeStatus:
        """Return the state of the group's jobs."""
        return IntakeStatus(
            worker=self._worker.name,
            in_flight=tuple(self._reporter.active),
            finished=self._reporter.num_finished,
            failed=self._reporter.num_failed,
            pace_s=self._reporter.pace.seconds(time.monotonic()),
            draining=self._dispatcher.draining.is_set(),
            loras=self._worker.abilities.loras,
            ability=self._worker.abilities.own.id,
        )

    @property
    def condition(self) -> Condition | None:
        """Why no video can be started at present; None when it can."""
        return self._prefetcher.condition

    @property
    def idled(self) -> list[str] | None:
        """The queues of the group if it ends because it had nothing to do for long; else None."""
        return [queue.name for queue in self._worker.queues] if self._dispatcher.has_idled else None

    def ended(self, report: Report) -> None:
        self._reporter.add(report)

    def drain(self) -> None:
        """Take no more jobs; finish those in flight."""
        self._dispatcher.draining.set()
        self._wake.set()

    def stop(self) -> None:
        """Make a waiting `take` return, since the rank stops."""
        self.drain()
        self._dispatcher.ready.put(None)

    def close(self, *, return_to_queue: bool) -> None:
        """Report what has ended, return the other jobs to the queue if asked to, and leave Redis."""
        if return_to_queue:
            self._give_up_at = time.monotonic() + GIVE_UP_S
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self._leases.stop(GIVE_UP_S)
        try:
            if return_to_queue:
                self._worker.return_to_queue(self._reporter.active.values())
                logger.info("Stopped; %s went back to the queue.", count(len(self._reporter.active), "job"))
            self._sweep()
            self._worker.end()
        except redis.RedisError as error:
            logger.warning("Redis does not answer (%s); jobs in flight are taken again after their lease.", error)
        self._dispatcher.close()

    # The bookkeeping thread.

    def _run(self) -> None:
        while True:
            # Read before the round, which then writes everything that ended before the group was closed.
            closing = self._closing.is_set()
            try:
                self._round(closing=closing)
                self._connection_health.succeeded()
                if closing:
                    return
            except redis.RedisError as error:
                self._connection_health.failed(error)
                self._recovery.redis_failed()
                self._worker.stop_listening()
                if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                    return
                time.sleep(RETRY_S)
            except Exception:
                # An error of this program with one job must not stop the others.
                logger.exception("The bookkeeping failed; it continues.")
                time.sleep(RETRY_S)
            self._wake.wait(self._pause_s())
            self._wake.clear()

    def _pause_s(self) -> float:
        """Return the seconds to the next round; whatever this process does wakes it earlier."""
        now = time.monotonic()
        if self._reporter.active:
            self._busy_at = now
        if now >= self._due_at:
            return POLL_S  # more jobs are due
        if not self._dispatcher.is_waiting(self._num_taken):
            return SLOW_POLL_S
        return min(SLOW_POLL_S, POLL_S + (now - self._busy_at) / SLOW_AFTER_S)

    def _round(self, *, closing: bool) -> None:
        if not self._begun:
            self._worker.start()
            self._recovery.at_start(self._options.suspects)
            self._leases.start()
            self._begun = True
        if time.monotonic() >= self._look_at:
            self._worker.look_around()
            self._look_at = time.monotonic() + BEAT_S
        for command in self._worker.listen():
            if command.name == "shutdown":
                self.drain()
            else:
                self._reporter.cancel(command.job_id, command.execution_id)
        self._reporter.write_ends()
        if closing:
            return
        if time.monotonic() >= self._due_at:
            more = self._worker.promote_due()
            self._due_at = time.monotonic() + (0.0 if more else DUE_S)
        self._dispatcher.fill(self._num_taken)
        if time.monotonic() >= self._maintain_at:
            seen = self._recovery.look()
            self._recovery.unknown(self._reporter.execution_ids, seen)
            self._recovery.expired(seen)
            self._maintain_at = time.monotonic() + MAINTENANCE_S
        if time.monotonic() >= self._clean_up_at:
            # One group does it for all.
            if self._worker.connection.set(keys.MAINTAINED, self._worker.name, nx=True, px=int(CLEAN_UP_S * 1000)):
                self._worker.maintain()
            self._clean_up_at = time.monotonic() + CLEAN_UP_S
        if time.monotonic() >= self._sweep_at:
            # In a thread, since listing a bucket takes long.
            threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
            self._sweep_at = time.monotonic() + SWEEP_S

    def _sweep(self) -> None:
        """Remove the checkpoints of jobs that ended while no group was there to do it."""

        def which_ended(job_ids: list[str]) -> dict[str, bool]:
            found = zip(job_ids, statuses(self._worker.connection, job_ids), strict=True)
            return {job_id: status in ENDED for job_id, status in found if status is not None}

        if self._checkpoints is not None:
            with contextlib.suppress(redis.RedisError):
                self._checkpoints.sweep(which_ended)
