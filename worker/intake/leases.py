"""Renews the leases of a group in a separate thread, which nothing else delays, so it notices a lost Redis first."""

import logging
import threading
from collections.abc import Callable

import redis

from svdq.worker.outages import RETRY_S, ConnectionHealth
from svdq.worker.queue.rq_worker import BEAT_S

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
