"""Records in Redis that a worker is starting, which takes 10 to 60 s until RQ shows it. Does not import torch."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import redis

from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer import keys
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.worker.redis_client import connect

#: Seconds between two renewals of the record, less than half of `keys.STARTING_TTL_S`; one that is left when the groups
#: are ready does no harm, since RQ shows them then.
RENEW_S: Final = 4.0
#: Seconds that the end of a launcher waits for its record to be removed; it expires anyway.
END_S: Final = 1.0


@contextlib.contextmanager
def starting_record(settings: Settings, model: ResolvedModel, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Keep the record of this launcher during a block or until its groups are ready, in a thread."""
    url, ended = server_url(settings), threading.Event()

    def keep() -> None:
        name = f"{socket.gethostname()}:{os.getpid()} {model.family or '-'} {model.name}"
        with connect(url) as connection:
            while not (is_ready() or ended.is_set()):
                with contextlib.suppress(redis.RedisError):
                    _renew(connection, name)
                ended.wait(RENEW_S)
            with contextlib.suppress(redis.RedisError):
                connection.zrem(keys.STARTING, name)

    thread = threading.Thread(target=keep, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def _renew(connection: redis.Redis, name: str) -> None:
    now, _ = connection.time()
    with connection.pipeline() as pipeline:
        pipeline.zadd(keys.STARTING, {name: now + keys.STARTING_TTL_S})
        pipeline.zremrangebyscore(keys.STARTING, "-inf", now)
        pipeline.expire(keys.STARTING, keys.STARTING_TTL_S)
        pipeline.execute()
