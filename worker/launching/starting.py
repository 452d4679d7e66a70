"""Records in Redis that workers are starting, which takes 10 to 60 s until RQ knows them. Does not import torch."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import redis

from svdq.producer import keys
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.worker.redis_link import connect

#: Seconds between two renewals of the record; several fit into `keys.STARTING_TTL_S`.
RENEW_S: Final = 4.0
#: Seconds between two checks whether the groups are ready.
CHECK_S: Final = 0.2
#: Seconds that the end of a launcher waits for its record to be removed; it expires anyway.
END_S: Final = 1.0


class StartingRecord:
    """The record of this launcher, for the length of a block or until its groups are ready."""

    def __init__(self, settings: Settings, is_ready: Callable[[], bool]) -> None:
        self._connection = connect(server_url(settings))
        self._is_ready = is_ready
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        renew_in = 0.0
        while not self._is_ready():
            if renew_in <= 0:
                with contextlib.suppress(redis.RedisError):
                    self._renew()
                renew_in = RENEW_S
            if self._ended.wait(CHECK_S):
                break
            renew_in -= CHECK_S
        with contextlib.suppress(redis.RedisError):
            self._connection.zrem(keys.STARTING, self._name)
        self._connection.close()

    def _renew(self) -> None:
        now, _ = self._connection.time()
        with self._connection.pipeline() as pipeline:
            pipeline.zadd(keys.STARTING, {self._name: now + keys.STARTING_TTL_S})
            pipeline.zremrangebyscore(keys.STARTING, "-inf", now)
            pipeline.expire(keys.STARTING, keys.STARTING_TTL_S)
            pipeline.execute()
