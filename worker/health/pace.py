"""How fast a group finishes videos while it is busy. Pure, no clock of its own."""

from collections import deque
from statistics import fmean

#: Videos by which the pace is judged.
WINDOW = 20


class Pace:
    """The pace of one group: only the time between two ends counts during which it was never without a job."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=WINDOW)
        #: When the last video was finished; None when the group has been idle since.
        self._last_s: float | None = None

    def finished(self, now_s: float) -> None:
        """Note that a video was finished, at so many seconds of any one clock."""
        if self._last_s is not None:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def idle(self) -> None:
        """Note that nothing is in flight."""
        self._last_s = None

    @property
    def seconds(self) -> float | None:
        """Seconds between two finished videos; None until there were two in a row."""
        return fmean(self._gaps_s) if self._gaps_s else None
