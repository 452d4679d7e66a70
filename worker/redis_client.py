"""Connections to Redis for a daemon, which waits instead of giving up."""

import logging
import time

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from svdq.pipeline.errors import UnavailableError
from svdq.producer.embedded_redis import ensure_server
from svdq.producer.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds after which a call without an answer is tried again; no GPU waits for it.
ANSWER_TIMEOUT_S = 5.0
#: Seconds between two attempts while Redis is unavailable.
RETRY_S = 1.0


def connect(url: str) -> redis.Redis:
    """Make a connection pool, which connects at its first use."""
    return redis.Redis.from_url(
        url,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 3),
        socket_connect_timeout=ANSWER_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        health_check_interval=30,
    )


class ConnectionHealth:
    """Logs once that Redis is unavailable and once that it is back; restarts the embedded server if it died."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Create it; without settings it restarts nothing."""
        self._settings = settings
        self._is_unavailable = False

    def failed(self, error: redis.RedisError) -> None:
        """Record that Redis did not answer."""
        if not self._is_unavailable:
            # Such as a command that its user may not give, or that needs more than maxmemory.
            is_refused = isinstance(error, redis.ResponseError | AuthenticationError)
            what = "refuses" if is_refused else "does not answer"
            logger.warning("Redis %s (%s); jobs in flight continue, and their ends are reported later.", what, error)
        self._is_unavailable = True
        if self._settings is not None and not self._settings.redis_url:
            try:
                ensure_server(self._settings.home)
            except UnavailableError as unavailable:
                logger.warning("%s", unavailable)

    def succeeded(self) -> None:
        """Record that Redis answered."""
        if self._is_unavailable:
            logger.info("Redis is back.")
        self._is_unavailable = False


def wait_for(connection: redis.Redis, connection_health: ConnectionHealth) -> None:
    """Wait until Redis answers."""
    while True:
        try:
            connection.ping()
            connection_health.succeeded()
            return
        except redis.RedisError as error:
            connection_health.failed(error)
            time.sleep(RETRY_S)
