"""Trying again what the storage refuses, for as long as it takes: a full disk at night fails no job. Knows no jobs."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.producer.status.ranks import Trouble

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until the second attempt; each further one waits twice as long, up to the last of these.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 8.0
#: What is wrong with the name or content of one file, and no better for any other attempt.
_HOPELESS = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})


class GaveUpError(SvdqError):
    """The worker stops while the storage still refuses; the job goes back to its queue."""


class UnwantedError(SvdqError):
    """Nobody wants any more what the storage still refuses: its job was cancelled or taken over."""


class Patience:
    """What one thread wants of the storage, and how often it has been refused."""

    def __init__(self, effect: str, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        """Make it.

        Args:
            effect: what a refusal keeps from happening, in words: "Videos wait to be written".
            first_delay_s: until the second attempt.
        """
        self._effect = effect
        self._first_delay_s = first_delay_s
        self._stopped = False
        #: Set when there may be a reason to wait no longer.
        self._nudge = threading.Event()
        #: Why the storage refuses at present; replaced as a whole by the thread that insists, read by any.
        self.trouble: Trouble | None = None

    def stop(self) -> None:
        """Have attempts end; from any thread."""
        self._stopped = True
        self._nudge.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def nudge(self) -> None:
        """Have whoever insists look now whether it is still wanted; from any thread."""
        self._nudge.set()

    def insist(self, attempt: Callable[[], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Attempt something until the storage lets it happen; the trouble is logged once, and once its end.

        Args:
            attempt: may be called many times.
            is_wanted: asked before every further attempt.

        Raises:
            GaveUpError: `stop` was called.
            UnwantedError: it is not wanted any more.
            Exception: whatever else `attempt` raises, and what no patience can mend.
        """
        delay_s = self._first_delay_s
        try:
            while True:
                try:
                    outcome = attempt()
                except (OSError, UnavailableError) as error:
                    if _is_hopeless(error):
                        raise
                    self._note(error)
                    self._nudge.wait(delay_s)
                    self._nudge.clear()
                    if self._stopped:
                        raise GaveUpError(str(error)) from error
                    if not is_wanted():
                        raise UnwantedError(str(error)) from error
                    delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                    continue
                if self.trouble is not None:
                    logger.info("The storage can be used again.")
                return outcome
        finally:
            self.trouble = None

    def _note(self, error: Exception) -> None:
        if self.trouble is None:
            logger.warning("%s: %s Trying again until it works.", self._effect, error)
            self.trouble = Trouble(effect=self._effect, reason=str(error), since=time.time(), attempts=1)
        else:
            self.trouble = self.trouble.model_copy(update={"reason": str(error), "attempts": self.trouble.attempts + 1})


def _is_hopeless(error: Exception) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _HOPELESS
