"""Queues jobs when they are due: `python -m svdq.worker.jobs.scheduler`. RQ's scheduler as a process of its own.

`svdq worker` starts one and ends it; ranks that torchrun starts without it need one beside them. Any number may run:
RQ's lock on each queue lets one of them work. Touches RQ's internals, like `rq_adapter`; knows no ranks, no torch.
"""

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import redis
import rq
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.utils import as_text, now

from svdq.producer import keys
from svdq.producer.queue import queues, server_url
from svdq.producer.settings import Settings
from svdq.worker import identity
from svdq.worker.jobs import handover
from svdq.worker.jobs.rq_worker import LEASE_S
from svdq.worker.redis_link import Outage, connect, restarter

logger = logging.getLogger("svdq.worker.jobs.scheduler")

#: Seconds between looks at what is due; RQ's times are whole seconds.
INTERVAL_S = 1
#: Seconds between tries to get the locks that others hold; RQ has 600.
LOCKS_S = 2.0
#: Jobs that are queued between two beats.
CHUNK = 1000
#: Seconds that it waits for Redis when it is told to end.
STOP_S = 2.0
#: What ends it in order.
SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Scheduler(RQScheduler):
    """RQ's scheduler, for queues with jobs that anyone may have written, and for a Redis that may go away."""

    def __init__(self, connection: redis.Redis) -> None:
        """Make it; nothing is written yet."""
        super().__init__(
            keys.QUEUE_NAMES,
            connection=connection,
            interval=INTERVAL_S,
            logging_level=logging.ERROR,
            serializer=JSONSerializer,
            name=identity.new_name(),
        )
        self._queues = queues(connection)
        self._is_born = False
        self._try_locks_at = 0.0

    @property
    def should_reacquire_locks(self) -> bool:
        """Whether it is time to try for the locks that others hold."""
        return self.acquired_locks != set(keys.QUEUE_NAMES) and time.monotonic() >= self._try_locks_at

    def acquire_locks(self, auto_start: bool = False) -> Any:
        """Get the locks that are free; those of schedulers that were killed on this host count as free."""
        self._try_locks_at = time.monotonic() + LOCKS_S
        for name in keys.QUEUE_NAMES:
            lock = self.get_locking_key(name)
            holder = as_text(self.connection.get(lock) or b"")
            if identity.is_gone(holder):
                handover.unlock(self.connection, lock, holder)
        return super().acquire_locks(auto_start=False)  # RQ's own start forks

    def heartbeat(self) -> None:
        """Prolong the locks: by a lease, where RQ has a minute, so that another host need not wait for long."""
        super().heartbeat()
        with self.connection.pipeline(transaction=False) as pipeline:
            for key in (self.key, *map(self.get_locking_key, self.acquired_locks)):
                pipeline.expire(key, LEASE_S)
            pipeline.execute()

    def enqueue_scheduled_jobs(self) -> int:
        """Queue what is due, the earliest first and then by age; return how many jobs of a chunk were looked at.

        Unlike RQ's own it reads no job whole, so that one which cannot be read keeps no other waiting, and what is
        cancelled meanwhile stays so.
        """
        seen = 0
        for queue in self._queues:
            if queue.name in self.acquired_locks and seen < CHUNK:
                job_ids = self._due(queue)[: CHUNK - seen]
                seen += len(job_ids)
                self._promote(queue, job_ids)
        return seen

    def _due(self, queue: rq.Queue) -> list[bytes]:
        """List the jobs that are due; RQ's times are whole seconds, and their age says in which order they came."""
        key = queue.scheduled_job_registry.key
        if self.connection.type(key) != b"zset":
            return []  # nothing is scheduled, or not by RQ
        due = self.connection.zrangebyscore(key, "-inf", int(time.time()), withscores=True)
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id, _ in due:
                pipeline.hget(handover.job_key(job_id), "created_at")
            answers = pipeline.execute(raise_on_error=False)
        ages = [age if isinstance(age, bytes) else b"" for age in answers]
        places = sorted((due_at, age, job_id) for (job_id, due_at), age in zip(due, ages, strict=True))
        return [job_id for _, _, job_id in places]

    def _promote(self, queue: rq.Queue, job_ids: list[bytes]) -> None:
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                handover.promote(pipeline, queue, job_id, now())
            queued = pipeline.execute().count(1)
        if queued:
            logger.info("%s due, in %s.", "1 job was" if queued == 1 else f"{queued} jobs were", queue.name)

    def tick(self) -> bool:
        """Do what there is to do once; return whether there may be more at once.

        Raises:
            redis.RedisError: it does not answer; nothing is lost, and the next call begins anew.
        """
        if not self._is_born:
            self.register_birth()
            self._is_born = True
        if self.should_reacquire_locks:
            self.acquire_locks()
        self.heartbeat()
        return self.enqueue_scheduled_jobs() == CHUNK

    def run(self, stopping: threading.Event, outage: Outage) -> None:
        """Work until it is told to stop, whatever becomes of Redis meanwhile."""
        while not stopping.is_set():
            more = False
            try:
                more = self.tick()
                outage.over()
            except redis.RedisError as error:
                self._is_born = False
                outage.note(error)
            if not more:
                stopping.wait(INTERVAL_S)
        try:
            self.stop()
        except redis.RedisError:
            logger.debug("The locks run out by themselves.")


def _wait_for_signal(stopping: threading.Event) -> None:
    signal.sigwait(SIGNALS)
    stopping.set()
    time.sleep(STOP_S)
    os._exit(0)  # Redis does not answer; the locks run out


def main() -> None:
    """Be the scheduler until SIGINT or SIGTERM."""
    settings = Settings.load()
    url = server_url(settings)
    stopping = threading.Event()
    # Taken by a thread that does nothing else, as in a rank; a Redis that is started from here must hear them again.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_wait_for_signal, args=(stopping,), name="signals", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="[scheduler] %(message)s", stream=sys.stderr)
    Scheduler(connect(url)).run(stopping, Outage(restarter(settings)))


if __name__ == "__main__":
    main()
