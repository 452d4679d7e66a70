"""The address that Prometheus scrapes: an HTTP server in a thread of the launcher, which computes nothing itself.

A scrape that hangs, or thousands of them, take time from the launcher, which only waits; no rank is asked.
"""

import logging
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import redis
from prometheus_client import CollectorRegistry, start_http_server
from redis.backoff import NoBackoff
from redis.retry import Retry

from svdq.pipeline.errors import InputError
from svdq.worker.metrics.collector import LauncherCollector, OwnGroup

logger = logging.getLogger(__name__)

#: Seconds after which Redis counts as away: Prometheus itself gives up after ten.
ANSWER_TIMEOUT_S = 2.0


class MetricsEndpoint:
    """The endpoint of one launcher, for the length of a block."""

    def __init__(self, address: str, port: int, redis_url: str) -> None:
        """Listen, and answer with an empty page until `tell_of`.

        Args:
            address: of this machine, to listen at.
            port: to listen at; 0 takes a free one.
            redis_url: where queues and ranks are.

        Raises:
            InputError: nothing can listen there.
        """
        self._connection = redis.Redis.from_url(
            redis_url,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
        )
        self._address = address
        self._registry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, address, self._registry)
        except (OSError, OverflowError) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"Metrics cannot be served at port {port} of {address!r} ({reason}); choose another --metrics-port or "
                "--metrics-address."
            ) from error

    def tell_of(self, groups: Sequence[OwnGroup]) -> None:
        """Answer with the launcher's groups, all of which have been started, and with their queues; say where."""
        self._registry.register(LauncherCollector(self._connection, groups))
        host = f"[{self._address}]" if self._server.address_family is socket.AF_INET6 else self._address
        logger.info("Metrics are at http://%s:%d/metrics.", host, self._server.server_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._connection.close()
