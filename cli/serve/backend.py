"""The server's access to Redis and the storage: blocking work in a bounded number of threads."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import redis

from svdq.cli.serve.errors import redis_away
from svdq.pipeline.errors import UnavailableError
from svdq.producer.queue import connect
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.threads import Budget

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Bytes of photos in memory at a time; a larger photo waits until it is alone.
PHOTO_BYTES = Budget(1 << 26)

#: Threads that read at a time, that check and store photos, that read the storage, and that make small pictures; others
#: wait.
READING_THREADS = 8
WRITING_THREADS = 4
STORAGE_THREADS = 8
PICTURE_THREADS = 2
#: Seconds that a read may take, the start of the embedded server included.
READ_TIMEOUT_S = 10.0
#: Seconds for which the first requests wait while another connects.
CONNECT_S = 10.0
#: Seconds for which Redis counts as away after it has failed, so that hundreds of requests do not wait for it in turn.
AWAY_S = 1.0


class Backend:
    """Runs blocking work in threads, with one pool of connections."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.storage = Storage(settings.storage)
        self._connection: redis.Redis | None = None
        self._away_until = 0.0
        self._is_lost = False
        self._lock = threading.Lock()
        self._reading = anyio.CapacityLimiter(READING_THREADS)
        self._writing = anyio.CapacityLimiter(WRITING_THREADS)
        self._storage = anyio.CapacityLimiter(STORAGE_THREADS)
        self._pictures = anyio.CapacityLimiter(PICTURE_THREADS)

    async def read(self, work: Callable[[redis.Redis], Result]) -> Result:
        """Run short work with Redis in a thread.

        Raises:
            ApiError: Redis is away.
        """
        try:
            with anyio.fail_after(READ_TIMEOUT_S):
                return await anyio.to_thread.run_sync(
                    self._with_redis, work, limiter=self._reading, abandon_on_cancel=True
                )
        except TimeoutError as error:
            raise redis_away() from error

    async def write(self, work: Callable[[redis.Redis], Result]) -> Result:
        """Run work on photos and videos with Redis in a thread; a client that disconnects does not interrupt it.

        Raises:
            ApiError: Redis is away.
        """
        return await anyio.to_thread.run_sync(self._with_redis, work, limiter=self._writing)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work with the storage, without Redis, in a thread."""
        return await anyio.to_thread.run_sync(work, limiter=self._storage)

    async def make_picture(self, work: Callable[[], Result]) -> Result:
        """Run work that decodes pictures in a thread."""
        return await anyio.to_thread.run_sync(work, limiter=self._pictures)

    def close(self) -> None:
        """Close the connections."""
        if self._connection is not None:
            self._connection.close()

    def _with_redis(self, work: Callable[[redis.Redis], Result]) -> Result:
        connection = self._connect()
        try:
            return work(connection)
        except redis.RedisError as error:
            if isinstance(error, redis.ConnectionError | redis.TimeoutError):
                self._drop(connection)
            logger.warning("Redis cannot be used: %s", error)
            raise redis_away() from error

    def _connect(self) -> redis.Redis:
        """Return the connection; connect again, which starts the embedded server again, if it was lost."""
        if (connection := self._connection) is not None:
            return connection
        # A server that was lost may hang: one request tries it, and the others are answered at once.
        if not self._lock.acquire(timeout=0 if self._is_lost else CONNECT_S):
            raise redis_away()
        try:
            if self._connection is None:
                if time.monotonic() < self._away_until:
                    raise redis_away()
                self._connection = connect(self.settings)
                self._is_lost = False
            return self._connection
        except UnavailableError as error:
            self._away_until, self._is_lost = time.monotonic() + AWAY_S, True
            logger.warning("%s", error)
            raise redis_away() from error
        finally:
            self._lock.release()

    def _drop(self, connection: redis.Redis) -> None:
        """Connect anew at the next request. Other threads may still use the old connections, so they are not closed."""
        if self._connection is connection:
            self._connection = None
            self._is_lost = True
