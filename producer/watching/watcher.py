"""The loop of a watcher: look, take, wait; and patience when Redis or the storage is away."""

import time
from collections.abc import Callable

from svdq.pipeline.errors import UnavailableError
from svdq.producer.watching.changes import Changes, Stop
from svdq.producer.watching.events import Troubles
from svdq.producer.watching.settling import Settling
from svdq.producer.watching.sight import Sight
from svdq.producer.watching.taker import Taker

#: Seconds until Redis or the storage is tried again: at first, and at most, doubling.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0


class Watcher:
    """Watches one folder."""

    def __init__(
        self,
        *,
        sight: Sight,
        settling: Settling,
        taker: Taker,
        changes: Changes,
        troubles: Troubles,
        stop: Stop,
    ) -> None:
        """Make it.

        Args:
            sight: sees files and puts them into `settling`.
            settling: the files that are waited for.
            taker: takes those that are due.
            changes: wakes it.
            troubles: is told when Redis or the storage is away.
            stop: ends it, after the file at hand.
        """
        self._sight = sight
        self._settling = settling
        self._taker = taker
        self._changes = changes
        self._troubles = troubles
        self._stop = stop
        self._retry_at_s, self._delay_s = 0.0, FIRST_DELAY_S

    def run(self) -> None:
        """Watch until told to stop."""
        while not self._stop.is_set():
            self._attempt(self._look_and_take)
            self._sight.note(self._changes.wait())

    def run_once(self) -> None:
        """Take what is there.

        Raises:
            UnavailableError: Redis, the storage or the ledger cannot be used.
        """
        self._sight.look()
        while self._settling and not self._stop.is_set():
            self._take_due()
            self._changes.wait()

    def _look_and_take(self) -> None:
        self._sight.look()
        self._take_due()

    def _take_due(self) -> None:
        while not self._stop.is_set():
            path = self._settling.next_due(time.monotonic())
            if path is None:
                return
            if self._taker.take(path):
                self._delay_s = FIRST_DELAY_S
                self._troubles.end("away", "What was away is back; going on.")

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do some work, unless it is too soon after it could not be done."""
        if time.monotonic() < self._retry_at_s:
            return
        try:
            work()
        except UnavailableError as error:
            self.wait_out(error)

    def wait_out(self, error: UnavailableError) -> None:
        """Do nothing for a while, for Redis, the storage or the ledger cannot be used."""
        self._troubles.begin("away", f"{error} Photos wait until it is back.")
        self._retry_at_s = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
