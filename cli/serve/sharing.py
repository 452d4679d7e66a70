"""Reads that many requests share: Redis is asked once a second, however many pages are open."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

#: Seconds for which an answer is given to everybody who asks.
FRESH_S = 1.0
#: Number of answers kept at a time.
MAX_KEYS = 1000


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

    def __init__(self, read: Callable[[Key], Awaitable[Value]]) -> None:
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
            entry = _Entry(now, asyncio.create_task(self._run(key)))
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

    async def _run(self, key: Key) -> Value:
        return await self._read(key)

    def _forget_old(self, now: float) -> None:
        if len(self._entries) >= MAX_KEYS:
            old = [key for key, entry in self._entries.items() if entry.is_old(now)]
            for key in old:
                del self._entries[key]
