"""Records in Redis that a worker is starting, which takes 10 to 60 s until RQ shows it. Does not import torch."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import redis

from svdq.producer import keys
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.worker.redis_client import connect

#: Seconds between two renewals of the record, less than half of `keys.STARTING_TTL_S`.
RENEW_S: Final = 4.0
#: Seconds between two checks whether the groups are ready.
CHECK_S: Final = 0.2
#: Seconds that the end of a launcher waits for its record to be removed; it expires anyway.
END_S: Final = 1.0


@contextlib.contextmanager
def starting_record(settings: Settings, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Keep the record of this launcher during a block or until its groups are ready, in a thread."""
    ended = threading.Event()
    arguments = (connect(server_url(settings)), is_ready, ended)
    thread = threading.Thread(target=_keep, args=arguments, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def _keep(connection: redis.Redis, is_ready: Callable[[], bool], ended: threading.Event) -> None:
    name, renew_in = f"{socket.gethostname()}:{os.getpid()}", 0.0
    while not is_ready():
        if renew_in <= 0:
            with contextlib.suppress(redis.RedisError):
                _renew(connection, name)
            renew_in = RENEW_S
        if ended.wait(CHECK_S):
            break
        renew_in -= CHECK_S
    with contextlib.suppress(redis.RedisError):
        connection.zrem(keys.STARTING, name)
    connection.close()


def _renew(connection: redis.Redis, name: str) -> None:
    now, _ = connection.time()
    with connection.pipeline() as pipeline:
        pipeline.zadd(keys.STARTING, {name: now + keys.STARTING_TTL_S})
        pipeline.zremrangebyscore(keys.STARTING, "-inf", now)
        pipeline.expire(keys.STARTING, keys.STARTING_TTL_S)
        pipeline.execute()
