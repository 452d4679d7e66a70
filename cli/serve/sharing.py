"""Reads that many requests share: Redis is asked once a second, however many pages are open and clients poll."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis

from svdq.cli.serve.backend import Backend
from svdq.producer.keys import QUEUE_NAMES
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.snapshot import estimate
from svdq.producer.status.status import JobView, view_many

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


class Polls:
    """Reads jobs by id; each at most once a second, and as many as are waiting in one go."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shared: Shared[str, Polled] = Shared(self._read)
        self._waiting: set[str] = set()
        self._found: dict[str, Polled] = {}
        self._is_reading = asyncio.Lock()

    async def get(self, job_id: str) -> Polled:
        """Return a job, at most a second old.

        Raises:
            ApiError: Redis is away.
        """
        return await self._shared.get(job_id)

    def forget(self, job_id: str) -> None:
        """Read a job anew at the next request."""
        self._shared.forget(job_id)

    async def _read(self, job_id: str) -> Polled:
        self._waiting.add(job_id)
        async with self._is_reading:
            if job_id not in self._found:  # the first reads what others have asked for meanwhile
                batch, self._waiting = [*{*self._waiting, job_id}], set()
                found = await self._backend.read(lambda connection: _read_all(connection, batch))
                self._found |= {each: found.get(each) for each in batch}
            return self._found.pop(job_id)


def _read_all(connection: redis.Redis, job_ids: list[str]) -> dict[str, Polled]:
    # Other programs may have jobs in the same Redis. A record that cannot be read has no queue.
    views = [view for view in view_many(connection, job_ids) if view.queue in (*QUEUE_NAMES, "")]
    estimates = estimate_pending(connection, views)
    return {view.id: (view, estimates.get(view.id)) for view in views}


def estimate_pending(connection: redis.Redis, views: list[JobView]) -> dict[str, Estimate]:
    """Estimate when jobs will be done, in a fixed number of round trips; those that have ended need none."""
    pending = [view for view in views if not view.ended]
    return estimate(connection, pending) if pending else {}
