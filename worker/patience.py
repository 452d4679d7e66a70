"""Trying again what the storage refuses, for as long as it takes: a full disk at night fails no job. Knows no jobs."""

import errno
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from svdq.pipeline.errors import SvdqError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until the second attempt; each further one waits twice as long, up to the last of these.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 8.0
#: What is wrong with the name or content of one file, and no better for any other attempt.
_HOPELESS = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})


class GaveUpError(SvdqError):
    """The worker stops while the storage still refuses; the job goes back to its queue."""


class Patience:
    """What one thread wants of the storage, and how often it has been refused."""

    def __init__(self, what_waits: str, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        """Make it.

        Args:
            what_waits: in words, for the log: "Videos wait to be written".
            first_delay_s: until the second attempt.
        """
        self._what_waits = what_waits
        self._first_delay_s = first_delay_s
        self._stopping = threading.Event()
        #: Why the storage refuses at present, as a sentence.
        self.trouble: str | None = None

    def stop(self) -> None:
        """Have attempts end; from any thread."""
        self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def insist(self, attempt: Callable[[], T]) -> T:
        """Attempt something until the storage lets it happen; the trouble is logged once, and once its end.

        Args:
            attempt: may be called many times.

        Raises:
            GaveUpError: `stop` was called.
            Exception: whatever else `attempt` raises, and what no patience can mend.
        """
        delay_s = self._first_delay_s
        while True:
            try:
                outcome = attempt()
            except (OSError, UnavailableError) as error:
                if _is_hopeless(error):
                    raise
                if self.trouble is None:
                    logger.warning("%s: %s Trying again until it works.", self._what_waits, error)
                self.trouble = str(error)
                if self._stopping.wait(delay_s):
                    raise GaveUpError(str(error)) from error
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                continue
            if self.trouble is not None:
                self.trouble = None
                logger.info("The storage can be used again.")
            return outcome


def _is_hopeless(error: Exception) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _HOPELESS
