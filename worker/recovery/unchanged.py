"""Says for how long things in Redis have not changed, by the monotonic clock of the process that looks at them."""

import time
from collections.abc import Callable, Hashable, Mapping


class Unchanged:
    """What was seen in which state, and since when."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        #: By place: for each thing its state, and when it was first seen in it.
        self._seen: dict[str, dict[bytes, tuple[Hashable, float]]] = {}

    def seconds(self, place: str, states: Mapping[bytes, Hashable]) -> dict[bytes, float]:
        """Return for how many seconds each thing in a place has been seen in its state; 0 for what is new."""
        now = self._monotonic()
        before, seen = self._seen.get(place, {}), {}
        for name, state in states.items():
            known = before.get(name)
            seen[name] = known if known is not None and known[0] == state else (state, now)
        self._seen[place] = seen
        return {name: now - since for name, (_, since) in seen.items()}

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()
