"""Connections to Redis for a daemon, which waits instead of giving up. Knows no jobs."""

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

#: Seconds after which a call that gets no answer is tried again; a bookkeeping thread is waiting, no GPU.
ANSWER_TIMEOUT_S = 5.0


def connect(url: str) -> redis.Redis:
    """Make a connection pool for one thread; it connects when it is first used."""
    return redis.Redis.from_url(
        url,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 3),
        socket_connect_timeout=ANSWER_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        health_check_interval=30,
    )
