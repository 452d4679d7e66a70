"""The clock of Redis, which all hosts share, as this process knows it."""

import time
from datetime import UTC, datetime, timedelta

CLOSE_S = 1.0  # seconds of a difference that the way to Redis may make


class SharedClock:
    """Tells the time of Redis by this machine's clock and the last answer of Redis; for any thread."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def note(self, redis_s: float) -> None:
        """Note what Redis has just answered, in seconds since the epoch."""
        ahead_s = redis_s - time.time()
        self._ahead_s = ahead_s if abs(ahead_s) > CLOSE_S else 0.0

    def now(self) -> datetime:
        """Return the time in UTC, with a zone."""
        return datetime.now(UTC) + timedelta(seconds=self._ahead_s)


#: What workers record of jobs and videos has its times.
CLOCK = SharedClock()
