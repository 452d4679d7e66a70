"""Measures how long values in Redis have not changed, by the monotonic clock of this process."""

import time
from collections.abc import Callable, Hashable, Mapping


class StalenessTracker:
    """Remembers the state of each value and when it was first seen."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        #: By key: for each member its state, and when it was first seen in it.
        self._seen: dict[str, dict[bytes, tuple[Hashable, float]]] = {}

    def seconds(self, key: str, states: Mapping[bytes, Hashable]) -> dict[bytes, float]:
        """Return for how many seconds each member of a key has been seen in its state; 0 for a new member."""
        now = self._monotonic()
        before, seen = self._seen.get(key, {}), {}
        for name, state in states.items():
            known = before.get(name)
            seen[name] = known if known is not None and known[0] == state else (state, now)
        self._seen[key] = seen
        return {name: now - since for name, (_, since) in seen.items()}

    def forget(self) -> None:
        """Forget all states."""
        self._seen.clear()
