"""How a daemon waits for Redis and for the storage instead of failing jobs."""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.producer.connection import answer_of, reconnecting
from svdq.producer.embedded_redis import ensure_server
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import Condition
from svdq.producer.storage.storage import Storage
from svdq.producer.threads import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_TIMEOUT_S, NUM_RETRIES = 5.0, 3  # seconds after which a call to Redis without an answer is tried again
#: The same of the thread that renews leases: it notices within 15 s that Redis does not answer.
LEASE_TIMEOUT_S, NUM_LEASE_RETRIES = 4.0, 1
RETRY_S = 1.0  # seconds between two attempts of Redis
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 8.0  # until the storage is tried again, doubling up to the second
UNANSWERED_S, ANSWER_S = 25.0, 5.0  # seconds of a call after which the storage is asked, and to its answer, at most
GIVE_BACK_S = 120.0  # seconds without the storage after which taken jobs go back, for hosts that reach it
FILE_TIMEOUT_S = 300.0  # seconds that a storage which works otherwise may refuse one file before its job fails
_HOPELESS = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})  # no further attempt helps
_TAKEN = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})  # something else has the name
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # a small file may fit where a video does not


def connect(url: str, timeout_s: float = ANSWER_TIMEOUT_S, num_retries: int = NUM_RETRIES) -> redis.Redis:
    """Make a connection pool, which connects at its first use."""
    connection = redis.Redis.from_url(
        url,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), num_retries),
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        health_check_interval=30,
    )
    return reconnecting(connection)


class ConnectionHealth:
    """Logs once that Redis is unavailable and once that it is back; with settings, restarts a dead embedded server.

    Each of several threads says what it has found; Redis is back when it has answered all of them.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # the threads that it has not answered

    def failed(self, error: redis.RedisError) -> None:
        """Record that Redis did not answer."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.add(threading.get_ident())
        if is_first:
            # Such as a command that its user may not give, or that needs more than maxmemory.
            is_refused = isinstance(error, redis.ResponseError | AuthenticationError)
            what = "refuses" if is_refused else "does not answer"
            sentence = "Redis %s (%s); jobs in flight continue, and their ends are reported later."
            logger.warning(sentence, what, answer_of(error))
        if self._settings is not None and not self._settings.redis_url:
            try:
                ensure_server(self._settings.home)
            except UnavailableError as unavailable:
                logger.warning("%s", unavailable)

    def succeeded(self) -> None:
        """Record that Redis answered."""
        with self._lock:
            was_waiting = bool(self._waiting)
            self._waiting.discard(threading.get_ident())
            is_back = was_waiting and not self._waiting
        if is_back:
            logger.info("Redis is back.")


def wait_for(connection: redis.Redis, connection_health: ConnectionHealth) -> None:
    """Wait until Redis answers."""
    while True:
        try:
            connection.ping()
            connection_health.succeeded()
            return
        except redis.RedisError as error:
            connection_health.failed(error)
            time.sleep(RETRY_S)


def check_storage(url: str) -> None:
    """Raise an UnavailableError if the storage is read-only; ranks wait for one that is unavailable or full."""
    try:
        Storage(url).check_writable()
    except UnavailableError as error:
        if _errno(error) in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


class RetryStoppedError(SvdqError):
    """The worker stops while it waits for the storage; the job goes back to its queue."""


class NoLongerWantedError(SvdqError):
    """The job was canceled or taken over while it waited for the storage."""


class StorageRetry:
    """Repeats calls to the storage until they succeed; several threads may call at the same time."""

    def __init__(self, effect: str, answers: Callable[[], bool] = lambda: True) -> None:
        """Make it; `effect` says what a refusal delays, as "Videos wait to be written"; `answers` asks the storage."""
        self._effect = effect
        self._answers = answers
        self.stopped = False
        self._wake = threading.Event()
        self._lock = threading.Lock()
        #: Why the storage refuses each call at present, in the order of their first refusals.
        self._refused: dict[threading.Event, Condition] = {}

    @property
    def condition(self) -> Condition | None:
        """Why the storage refuses at present; of several calls, the one that has waited longest."""
        with self._lock:
            return next(iter(self._refused.values()), None)

    def stop(self) -> None:
        """End all attempts; from any thread."""
        self.stopped = True
        self._wake.set()

    def wake(self) -> None:
        """End the present delays; from any thread."""
        self._wake.set()

    def call(self, attempt: Callable[[], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Repeat an operation until the storage accepts it, as long as it `is_wanted`; raises what no retry can fix."""
        delay_s = FIRST_DELAY_S
        with self.watched() as call:
            while True:
                try:
                    return attempt()
                except (OSError, UnavailableError) as error:
                    if _errno(error) in _HOPELESS:
                        raise
                    self._note(call, error)
                    self._wake.wait(delay_s)
                    if self.stopped:
                        raise RetryStoppedError(str(error)) from error
                    self._wake.clear()
                    if not is_wanted():
                        raise NoLongerWantedError(str(error)) from error
                    delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    @contextlib.contextmanager
    def watched(self) -> Iterator[threading.Event]:
        """Note if the storage hangs in the block; yield an event that is set when the block has ended."""
        call = threading.Event()
        threading.Thread(target=self._watch, args=(call,), name="watch", daemon=True).start()
        try:
            yield call
            self._accept(call)
        finally:
            with self._lock:
                call.set()
                self._refused.pop(call, None)

    def _watch(self, call: threading.Event) -> None:
        """Note that the storage hangs, which a long call alone does not show: it may be at work."""
        while not call.wait(UNANSWERED_S):
            try:
                does_answer = within(ANSWER_S, self._answers)
            except TimeoutError:
                does_answer = False
            if not does_answer:
                reason = f"The storage has not answered for {UNANSWERED_S + ANSWER_S:.0f} s."
                self._note(call, UnavailableError(reason))
                if self._answers():
                    self._accept(call)

    def _accept(self, call: threading.Event) -> None:
        with self._lock:
            was_last = self._refused.pop(call, None) is not None and not self._refused
        if was_last:
            logger.info("The storage can be used again.")

    def _note(self, call: threading.Event, error: Exception) -> None:
        with self._lock:
            if call.is_set():
                return
            is_first = not self._refused
            before = self._refused.get(call) or Condition(effect=self._effect, reason="", since=time.time(), attempts=0)
            self._refused[call] = before.model_copy(update={"reason": str(error), "attempts": before.attempts + 1})
        if is_first:
            logger.warning("%s: %s Trying again until it works.", self._effect, error)


class FileRefusals:
    """Measures for how long a storage that works otherwise refuses one file."""

    def __init__(self) -> None:
        self._since: float | None = None

    def check(self, error: Exception, what: str) -> None:
        """Record a refusal of `what`; raise an SvdqError if no further attempt helps, or after `FILE_TIMEOUT_S`."""
        now = time.monotonic()
        is_first = self._since is None
        self._since = now if self._since is None else self._since
        number = _errno(error)
        # Whatever was in the way of the whole storage may have gone since: a name that is taken is refused again.
        if number in _FULL or (number in _TAKEN and is_first):
            return
        if number in _HOPELESS | _TAKEN:
            raise SvdqError(f"{what} cannot be read or written: {_reason(error)}.") from error
        if now - self._since >= FILE_TIMEOUT_S:
            raise SvdqError(
                f"{what} could not be read or written for {FILE_TIMEOUT_S / 60:.0f} minutes, though the storage can "
                f"be used otherwise: {_reason(error)}. Fix the cause, then `svdq retry` the job."
            ) from error


def _cause(error: Exception) -> OSError | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause if isinstance(cause, OSError) else None


def _errno(error: Exception) -> int | None:
    return getattr(_cause(error), "errno", None)


def _reason(error: Exception) -> str:
    cause = _cause(error)
    if cause is None or not cause.strerror:
        return str(error).rstrip(".")
    hint = ", because something else has that name; remove it or choose another --output or --name"
    name = cause.filename2 or cause.filename
    return f"{cause.strerror}{f' at {str(name)!r}' if name else ''}{hint if cause.errno in _TAKEN else ''}"
