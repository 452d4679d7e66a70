"""The connection to Redis: made from the settings, checked, with errors in plain words and the clock of the server."""

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import (
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
)
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from svdq.pipeline.errors import InputError, UnavailableError, reason_of
from svdq.producer import keys
from svdq.producer.embedded_redis import ensure_server, full_disk
from svdq.producer.files import close_home
from svdq.producer.settings import HIDDEN, Settings, shown_redis_url
from svdq.producer.text import duration

logger = logging.getLogger(__name__)

#: Timeouts in seconds for connecting and for an answer: a person is waiting.
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 4.5
CLOCKS_S = 60.0  # seconds by which this machine's clock may differ from the clock of Redis without a warning
#: Two seconds of retries while a server refuses connections.
_RESTART = Retry(ConstantBackoff(0.2), 10, supported_errors=(redis.ConnectionError,))


def server_url(settings: Settings) -> str:
    """Return the URL of the Redis server; start the embedded one if none is set. Closes the home to other users."""
    if settings.redis_url is None:
        return ensure_server(settings.home)
    with contextlib.suppress(OSError):  # a command that needs the home makes it, or says why it cannot
        close_home(settings.home)
    return settings.redis_url


def connect(settings: Settings) -> redis.Redis:
    """Connect for an interactive command in about five seconds; raises UnavailableError, InputError for bad URLs."""
    url = server_url(settings)
    check_url(url)
    # redis-py's default of ten retries takes a minute; commands that can wait, such as `svdq wait`, retry themselves.
    connection = redis.Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        protocol=2,  # each of these saves a round trip or two
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
    )
    reconnecting(connection)
    with plain_errors(settings):
        try:
            is_loading = False
            while True:
                try:
                    # No other command is retried: it might be done twice.
                    _RESTART.call_with_retry(connection.ping, _unless_refused)
                    break
                except redis.ResponseError as error:
                    if "MISCONF" not in str(error):  # it answers what only reads
                        raise
                    break
                except redis.BusyLoadingError:
                    if not is_loading:
                        logger.warning("Redis loads its data; waiting for it.")
                    is_loading = True
        except RedisError:
            connection.close()
            raise
    return connection


def _unless_refused(error: Exception) -> None:
    if isinstance(error, redis.AuthenticationError):
        raise error


def check_url(url: str) -> None:
    """Raise an InputError unless redis-py understands a URL; does not connect."""
    shown, why = shown_redis_url(url), ""
    try:
        if shown == HIDDEN:
            raise ValueError  # redis-py would leave out a part of it, or connect to another host or database
        pool = redis.ConnectionPool.from_url(url)
        for name in _FILES:
            if (file := pool.connection_kwargs.get(name)) and not os.path.isfile(file):
                why = f": there is no file {file!r}, which {name} names"
                raise ValueError
        pool.connection_class(**pool.connection_kwargs)
        if host := pool.connection_kwargs.get("host"):  # else its codec is not imported
            str(host).encode("idna")  # UnicodeError would be no RedisError later
    except (TypeError, ValueError, RedisError) as error:  # their texts have parts of passwords
        if option := _NO_OPTION.search(str(error)):
            why = f": it has an option {option[1]!r}, which this kind of URL has not"
        which = "The Redis URL" if shown == HIDDEN else f"The Redis URL {shown!r}"
        raise InputError(
            f"{which} cannot be understood{why}; write it as redis://host:6379/0, rediss://… or unix:///path (in a "
            "password, @ as %40, / as %2F, # as %23, % as %25), or leave it out for the embedded server."
        ) from error


@contextlib.contextmanager
def plain_errors(settings: Settings) -> Iterator[None]:
    """Convert all errors of redis-py in a block to an UnavailableError that names the server."""
    try:
        yield
    except RedisError as error:
        # Redis ends when it cannot write.
        if not settings.redis_url and (full := full_disk(settings.home)):
            raise UnavailableError(full) from error
        where = shown_redis_url(settings.redis_url) if settings.redis_url else "embedded in " + str(settings.home)
        raise UnavailableError(f"The Redis server {where} {_complaint(error, where)}") from error


_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # options of URLs that name files
_NO_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
#: What redis-py puts before the answer of the server: the whole script or command, and its arguments.
_COMMAND = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


def answer_of(error: RedisError) -> str:
    """Return what the server answered, without the command."""
    return _COMMAND.sub("", reason_of(error))


def _complaint(error: RedisError, where: str) -> str:
    """Describe an error of a server, by its shown URL, and its fix; servers never repeat passwords in their answers."""
    reason = answer_of(error)
    if "MISCONF" in reason:
        return "cannot save its data, so it refuses writes; make room on its disk, or see in its log what is wrong."
    if "command not allowed when used memory" in reason:
        return "is full: it has reached its maxmemory. Raise that, or make room as docs/redis.md says."
    if isinstance(error, ClusterCrossSlotError | ClusterDownError | MovedError):
        return (
            "is a node of a cluster, which svdq cannot use, since its steps change several keys at once; name a single "
            "server, with replicas if you like."
        )
    if "HELLO must be called" in reason or "Authentication required" in reason:
        return "needs a password; set SVDQ_REDIS_URL with it, such as redis://:PASSWORD@host:6379/0."
    if isinstance(error, redis.AuthenticationError):
        return "refuses the user or the password; correct them in SVDQ_REDIS_URL."
    if "WRONG_VERSION_NUMBER" in reason or "wrong version number" in reason:
        return "speaks no TLS; write its URL with redis:// in place of rediss://."
    if "Connection closed by server" in reason and where.lower().startswith("redis://"):
        return "has closed the connection; if it expects TLS, write its URL with rediss:// in place of redis://."
    if isinstance(error, NoPermissionError) or "NOPERM" in reason:
        return f"does not allow its user to do this ({reason}); give that user the rights listed in docs/redis.md."
    return f"cannot be used ({reason}); check that it runs and that SVDQ_REDIS_URL or --redis-url is right."


def reconnecting(connection: redis.Redis) -> redis.Redis:
    """Make all connections of a pool connect again, and look up the name, when the server has become a replica."""
    pool = connection.connection_pool

    class Reconnecting(pool.connection_class):  # type: ignore[name-defined,misc]
        def read_response(self, *args: Any, **options: Any) -> Any:
            try:
                return super().read_response(*args, **options)
            except (redis.ReadOnlyError, MasterDownError):
                # In use, each connects again at its next command; another thread may be in the middle of one.
                pool.update_active_connections_for_reconnect()
                pool.disconnect(inuse_connections=False)
                raise

    pool.connection_class = Reconnecting
    return connection


def clock_of(connection: redis.Redis) -> datetime:
    """Return the time of Redis' clock, by which due jobs are queued, in the local time zone."""
    seconds, microseconds = connection.time()
    return datetime.fromtimestamp(seconds + microseconds / 1e6).astimezone()


def time_by_redis(settings: Settings) -> datetime:
    """Return the time of Redis' clock, as `clock_of`; warn if ours differs."""
    with session(settings) as connection:
        now = clock_of(connection)
    apart_s = (datetime.now().astimezone() - now).total_seconds()
    if abs(apart_s) > CLOCKS_S:
        relation = "ahead of" if apart_s > 0 else "behind"
        logger.warning(
            "The clock of this machine is %s %s the clock of Redis, by which jobs are queued.",
            duration(abs(apart_s)),
            relation,
        )
    return now


@contextlib.contextmanager
def session(settings: Settings, opened: redis.Redis | None = None) -> Iterator[redis.Redis]:
    """Connect within a block, convert errors, and close the connection; one that is `opened` is used as it is."""
    if opened is not None:
        yield opened
        return
    connection = connect(settings)
    try:
        with plain_errors(settings):
            yield connection
    finally:
        connection.close()


def database_id(connection: redis.Redis) -> str:
    """Return the id of this database, made at the first call: one that was emptied has another."""
    make_database_id(connection)
    return str(connection.get(keys.DATABASE_ID), "ascii", "replace")  # type: ignore[arg-type]


def make_database_id(connection: redis.Redis) -> None:
    """Make the id of this database, at the first call; Redis refuses each call while it refuses writes."""
    connection.set(keys.DATABASE_ID, uuid.uuid4().hex, nx=True)
