"""Connections to Redis for a daemon, which waits instead of giving up. Knows no jobs."""

import logging
import time
from collections.abc import Callable

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from svdq.pipeline.errors import UnavailableError
from svdq.producer.embedded_redis.server import ensure_server
from svdq.producer.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds after which a call that gets no answer is tried again; a bookkeeping thread is waiting, no GPU.
ANSWER_TIMEOUT_S = 5.0
#: Seconds between questions whether it is back.
RETRY_S = 1.0


def connect(url: str) -> redis.Redis:
    """Make a connection pool for one thread; it connects when it is first used."""
    return redis.Redis.from_url(
        url,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 3),
        socket_connect_timeout=ANSWER_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        health_check_interval=30,
    )


class Outage:
    """Says once that Redis is away and once that it is back, and starts the embedded server again if it died."""

    def __init__(self, restart: Callable[[], None] | None = None) -> None:
        """Make it.

        Args:
            restart: starts the server if it does not run; None when it is not ours to start.
        """
        self._restart = restart
        self._is_away = False

    def note(self, error: redis.RedisError) -> None:
        """Take note that Redis did not answer."""
        if not self._is_away:
            what = "refuses" if isinstance(error, NoPermissionError | AuthenticationError) else "does not answer"
            logger.warning("Redis %s (%s); what is in flight goes on, and its end is reported later.", what, error)
        self._is_away = True
        if self._restart is not None:
            try:
                self._restart()
            except UnavailableError as unavailable:
                logger.warning("%s", unavailable)

    def over(self) -> None:
        """Take note that Redis has answered."""
        if self._is_away:
            logger.info("Redis is back.")
        self._is_away = False


def restarter(settings: Settings) -> Callable[[], None] | None:
    """Give what starts the server of these settings again; None when it is not the embedded one."""
    if settings.redis_url:
        return None

    def restart() -> None:
        ensure_server(settings.home)

    return restart


def wait_for(connection: redis.Redis, outage: Outage) -> None:
    """Wait until Redis answers; says so once."""
    while True:
        try:
            connection.ping()
            outage.over()
            return
        except redis.RedisError as error:
            outage.note(error)
            time.sleep(RETRY_S)
