"""Retries storage operations until they succeed, so that a full disk fails no job."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.producer.status.ranks import Condition

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until the second attempt; the delay doubles with each further one, up to the second number.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 8.0
#: Errors of the name or content of one file, which no further attempt changes.
_HOPELESS = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
#: Something else has the name of a file or folder.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})
#: The storage is full: a small file may fit where a video does not.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
#: Seconds that a storage which works otherwise may refuse one file before its job fails: an object store has recovered
#: by then, and one file that nobody may read or write does not delay the other jobs all night.
FILE_TIMEOUT_S = 300.0


class RetryStoppedError(SvdqError):
    """The worker stops while it waits for the storage; the job goes back to its queue."""


class NoLongerWantedError(SvdqError):
    """The job was canceled or taken over while it waited for the storage."""


class StorageRetry:
    """Repeats one thread's calls to the storage until they succeed."""

    def __init__(self, effect: str, *, first_delay_s: float = FIRST_DELAY_S) -> None:
        """Create it.

        Args:
            effect: the effect of a refusal as a clause, such as "Videos wait to be written".
            first_delay_s: seconds until the second attempt.
        """
        self._effect = effect
        self._first_delay_s = first_delay_s
        self._stopped = False
        #: Ends the present delay.
        self._wake = threading.Event()
        #: Why the storage refuses at present; replaced as a whole by the calling thread.
        self.condition: Condition | None = None

    def stop(self) -> None:
        """End all attempts; from any thread."""
        self._stopped = True
        self._wake.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def wake(self) -> None:
        """End the present delay; from any thread."""
        self._wake.set()

    def call(self, attempt: Callable[[], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Repeat an operation until the storage accepts it; log the first refusal and the recovery.

        Args:
            attempt: the operation.
            is_wanted: called before every further attempt.

        Raises:
            RetryStoppedError: `stop` was called.
            NoLongerWantedError: `is_wanted` returned False.
            Exception: whatever else `attempt` raises, and storage errors that a retry cannot fix.
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
                    self._wake.wait(delay_s)
                    self._wake.clear()
                    if self._stopped:
                        raise RetryStoppedError(str(error)) from error
                    if not is_wanted():
                        raise NoLongerWantedError(str(error)) from error
                    delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                    continue
                if self.condition is not None:
                    logger.info("The storage can be used again.")
                return outcome
        finally:
            self.condition = None

    def _note(self, error: Exception) -> None:
        if self.condition is None:
            logger.warning("%s: %s Trying again until it works.", self._effect, error)
            self.condition = Condition(effect=self._effect, reason=str(error), since=time.time(), attempts=1)
        else:
            self.condition = self.condition.model_copy(
                update={"reason": str(error), "attempts": self.condition.attempts + 1}
            )


class FileRefusals:
    """Measures for how long a storage that works otherwise refuses one file."""

    def __init__(self, timeout_s: float = FILE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._since: float | None = None

    def check(self, error: Exception, what: str) -> None:
        """Record a refusal by a storage that was found to work otherwise.

        Args:
            error: of the storage.
            what: the file, such as "Its photo inputs/1f.jpg".

        Raises:
            SvdqError: no further attempt helps, or the first refusal was `timeout_s` ago.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        number = _errno(error)
        if number in _FULL:
            return
        if number in _HOPELESS | _TAKEN:
            raise SvdqError(f"{what} cannot be read or written: {_reason(error)}.") from error
        if now - self._since >= self._timeout_s:
            raise SvdqError(
                f"{what} could not be read or written for {self._timeout_s / 60:.0f} minutes, though the storage can "
                f"be used otherwise: {_reason(error)}. Fix the cause, then `svdq retry` the job."
            ) from error


def _is_hopeless(error: Exception) -> bool:
    return _errno(error) in _HOPELESS


def _errno(error: Exception) -> int | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def _reason(error: Exception) -> str:
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or not cause.strerror:
        return str(error).rstrip(".")
    hint = ", because something else has that name; remove it or choose another --output or --name"
    name = cause.filename2 or cause.filename
    return f"{cause.strerror}{f' at {str(name)!r}' if name else ''}{hint if cause.errno in _TAKEN else ''}"
