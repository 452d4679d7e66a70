"""The server's access to Redis and the storage: blocking work in a bounded number of threads."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread
import redis

from svdq.cli.serve.api_errors import redis_away
from svdq.pipeline.errors import UnavailableError
from svdq.producer.keys import QUEUE_NAMES
from svdq.producer.queue import connect
from svdq.producer.settings import Settings
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.snapshot import estimate
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


Key = TypeVar("Key")
Value = TypeVar("Value")

#: Seconds for which an answer is given to everybody who asks.
FRESH_S = 1.0
#: Number of answers kept at a time.
MAX_KEYS = 1000
#: A job and when it will be done; None if there is no such job.
Polled = tuple[JobView, Estimate | None] | None


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Value]):
    begun_at: float
    task: "asyncio.Task[Value]"

    def is_old(self, now: float) -> bool:
        """Return whether to read again: a slow read is not repeated before it ends, a failed one is at once."""
        if not self.task.done():
            return False
        return now - self.begun_at >= FRESH_S or self.task.cancelled() or self.task.exception() is not None


class Shared(Generic[Key, Value]):
    """Reads values by key; requests within a second of a read share its value, even while it is running."""

    def __init__(self, read: Callable[[Key], Coroutine[Any, Any, Value]]) -> None:
        self._read = read
        self._entries: dict[Key, _Entry[Value]] = {}

    async def get(self, key: Key) -> Value:
        """Return the value of a key, at most a second old.

        Raises:
            Exception: what the read raised.
        """
        now = time.monotonic()
        entry = self._entries.get(key)
        if entry is None or entry.is_old(now):
            self._forget_old(now)
            entry = _Entry(now, asyncio.create_task(self._read(key)))
            # Its error is not logged when all who asked have left.
            entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._entries[key] = entry
        return await asyncio.shield(entry.task)

    def forget(self, key: Key | None = None) -> None:
        """Read a key, or all, anew at the next request, because a request has changed it."""
        if key is None:
            self._entries.clear()
        else:
            self._entries.pop(key, None)

    def _forget_old(self, now: float) -> None:
        if len(self._entries) >= MAX_KEYS:
            old = [key for key, entry in self._entries.items() if entry.is_old(now)]
            for key in old:
                del self._entries[key]


def shared_polls(backend: Backend) -> Shared[str, Polled]:
    """Return the jobs that clients poll, by id; a read raises ApiError if Redis is away."""

    async def read(job_id: str) -> Polled:
        return await backend.read(lambda connection: _read(connection, job_id))

    return Shared(read)


def _read(connection: redis.Redis, job_id: str) -> Polled:
    for view in view_many(connection, [job_id]):
        # Other programs may have jobs in the same Redis. A record that cannot be read has no queue.
        if view.queue in (*QUEUE_NAMES, ""):
            return view, estimate_pending(connection, [view]).get(view.id)
    return None


def estimate_pending(connection: redis.Redis, views: list[JobView]) -> dict[str, Estimate]:
    """Estimate when jobs will be done, in a fixed number of round trips; those that have ended need none."""
    pending = [view for view in views if not view.ended]
    return estimate(connection, pending) if pending else {}
