"""Connects the ranks of a group into a ring, each rank to the next one.

Each rank publishes its address in an address book. The book outlives ranks, so an entry may be from a rank that is
gone. An entry therefore contains a secret for one connection: the caller sends it, and the listener answers with
another one. Until both match, the caller reads the entry again and retries.

The ring is closed one link after the other, starting at rank 0. A hello from rank 0 travels along it, to which each
rank adds information for rank 0. When it returns, all ranks are connected and no rank listens any more.
"""

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from svdq.pipeline.transport.address_book import AddressBook
from svdq.pipeline.transport.sockets import closing_on_error, configure, connect, is_path, listen

logger = logging.getLogger(__name__)

#: Bytes of the caller's secret, and of the answer.
_SECRET_BYTES: Final = 32
#: Bytes of the length of the hello that follows the secret, and largest length of a hello.
_LENGTH: Final = struct.Struct("!I")
_MAX_HELLO_BYTES: Final = 1 << 20
#: Timeout in seconds for a connection, the answer to a hello, and a caller's hello.
_CONNECT_S, _ANSWER_S, _HELLO_S = 5.0, 30.0, 30.0
#: Largest number of callers that have not sent the secret yet; the oldest is dropped for a new one.
_MAX_CALLERS: Final = 32
#: Seconds between two publications of the same entry, for books whose entries expire.
_PUBLISH_S: Final = 10.0
#: Seconds between two attempts, initial and largest.
_RETRY_S, _MAX_RETRY_S = 0.1, 1.0
#: Seconds of failed attempts before the first warning, and between two warnings.
_WARN_S, _WARN_AGAIN_S = 30.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A rank's two connections in the ring of all ranks."""

    #: To the rank after this one; from the last rank to rank 0.
    following: socket.socket
    #: From the rank before.
    preceding: socket.socket
    #: The ranks' information, rank 0 first: on rank 0 of all ranks, elsewhere of those before and of this one.
    rank_info: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Hello:
    """The message that travels along the ring."""

    #: Random; chosen by rank 0 at each start of the group.
    word: str
    rank_info: tuple[str, ...]

    def encoded(self) -> bytes:
        text = json.dumps({"word": self.word, "rank_info": self.rank_info}).encode()
        return _LENGTH.pack(len(text)) + text

    @classmethod
    def decoded(cls, text: bytes) -> "_Hello":
        document = json.loads(text)
        return cls(word=document["word"], rank_info=tuple(document["rank_info"]))


def close_ring(book: AddressBook, rank: int, num_ranks: int, address: str, rank_info: str = "") -> Ring:
    """Connect to the other ranks; waits while they load their models.

    Args:
        book: the same for all ranks.
        rank: this rank.
        num_ranks: K, at least two.
        address: where this rank listens: the path of a Unix socket, or an IP address of this host.
        rank_info: what rank 0 is to know of this rank.

    Raises:
        OSError: the others have ended, or been restarted.
        InputError: the path of the socket is too long.
    """
    next_name = _name((rank + 1) % num_ranks)
    listener = _Listener(book, _name(rank), address)
    with contextlib.closing(listener):
        if rank == 0:
            hello = _Hello(word=secrets.token_hex(16), rank_info=(rank_info,))
            following = _connect(book, next_name, hello)
            preceding, returned = listener.accept()
            if returned.word != hello.word:
                raise ConnectionError("a rank from before the restart called")
        else:
            preceding, received = listener.accept()
            returned = replace(received, rank_info=(*received.rank_info, rank_info))
            following = _connect(book, next_name, returned)
    return Ring(following=configure(following), preceding=configure(preceding), rank_info=returned.rank_info)


def agree(
    book: AddressBook,
    rank: int,
    num_ranks: int,
    address: str,
    rank_info: str,
    decide: Callable[[tuple[str, ...]], str],
) -> str:
    """Return what rank 0 decides from the information of all ranks; waits for all ranks. Leaves no connection.

    `decide` is called on rank 0 alone, with the `rank_info` of all ranks in order; the rest is as for `close_ring`.

    Raises:
        OSError: the others have ended, or been restarted.
        InputError: the path of the socket is too long.
    """
    ring = close_ring(book, rank, num_ranks, address, rank_info)
    with ring.following, ring.preceding:
        if rank == 0:
            text = decide(ring.rank_info).encode()
        else:
            (length,) = _LENGTH.unpack(_receive(ring.preceding, _LENGTH.size))
            text = _receive(ring.preceding, length)
        if rank < num_ranks - 1:
            ring.following.sendall(_LENGTH.pack(len(text)) + text)
    return text.decode()


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def _name(rank: int) -> str:
    return f"rank{rank}"


class _Listener:
    """Waits for the previous rank; publishes its address and a secret that only ranks of this group can read."""

    def __init__(self, book: AddressBook, name: str, address: str) -> None:
        self._book, self._name = book, name
        self._secret, self._answer = (secrets.token_hex(_SECRET_BYTES // 2).encode() for _ in range(2))
        self._address = address
        self._socket, port = listen(address)
        self._entry = json.dumps(
            {"address": address, "port": port, "secret": self._secret.decode(), "answer": self._answer.decode()}
        )
        book.publish(name, self._entry)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        if is_path(self._address):
            Path(self._address).unlink(missing_ok=True)

    def accept(self) -> tuple[socket.socket, _Hello]:
        """Wait for the previous rank and return its connection and hello; silent callers cause no delay."""
        self._socket.setblocking(False)
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(self._socket, selectors.EVENT_READ)
            #: In the order of their calls.
            callers: list[_Caller] = []

            def drop(caller: "_Caller") -> None:
                callers.remove(caller)
                selector.unregister(caller.connection)
                caller.connection.close()

            def drop_all() -> None:
                for caller in [*callers]:
                    drop(caller)

            stack.callback(drop_all)

            publish_at = time.monotonic() + _PUBLISH_S
            while True:
                if time.monotonic() >= publish_at:
                    self._book.publish(self._name, self._entry)
                    publish_at = time.monotonic() + _PUBLISH_S
                for key, _ in selector.select(timeout=1.0):
                    if key.fileobj is self._socket:
                        with contextlib.suppress(OSError):
                            caller = _Caller(self._socket.accept()[0], self._secret)
                            selector.register(caller.connection, selectors.EVENT_READ, caller)
                            callers.append(caller)
                        continue
                    caller = key.data
                    try:
                        hello = caller.read()
                        if hello is not None:
                            connection = caller.connection
                            connection.settimeout(_ANSWER_S)
                            connection.sendall(self._answer)
                            callers.remove(caller)
                            return connection, hello
                    except (OSError, ValueError, KeyError, TypeError):
                        drop(caller)
                now = time.monotonic()
                for caller in [caller for caller in callers if now >= caller.until]:
                    drop(caller)
                for caller in callers[:-_MAX_CALLERS]:
                    drop(caller)


class _Caller:
    """A connection whose hello has not arrived yet."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = time.monotonic() + _HELLO_S
        self._secret = secret
        self._received = b""

    def read(self) -> _Hello | None:
        """Read the data that has arrived; return None while the hello is incomplete.

        Raises:
            OSError: the secret is wrong, or the caller is gone.
            ValueError: the data after the secret is not a hello.
        """
        with contextlib.suppress(BlockingIOError):
            received = self.connection.recv(65536)
            if not received:
                raise ConnectionError("it closed the connection")
            self._received += received
        if len(self._received) < _SECRET_BYTES:
            return None
        if not hmac.compare_digest(self._received[:_SECRET_BYTES], self._secret):
            raise ConnectionError("it sent a wrong secret")
        start = _SECRET_BYTES + _LENGTH.size
        if len(self._received) < start:
            return None
        (length,) = _LENGTH.unpack(self._received[_SECRET_BYTES:start])
        if length > _MAX_HELLO_BYTES:
            raise ValueError("the hello is too long")
        return _Hello.decoded(self._received[start:]) if len(self._received) >= start + length else None


def _connect(book: AddressBook, name: str, hello: _Hello) -> socket.socket:
    """Connect to the listener published as `name`; waits until it is published."""
    warn_at = time.monotonic() + _WARN_S
    retry_s = _RETRY_S
    while True:
        reason, where = "it has not published its address", name
        entry = book.look_up(name)
        if entry is not None:
            try:
                document = json.loads(entry)
                where = f"{name} at {document['address']}, port {document['port']}"
                return _call(document, hello)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error)
        if time.monotonic() >= warn_at:
            warn_at = time.monotonic() + _WARN_AGAIN_S
            logger.warning("Cannot connect to %s (%s), retrying. It may still be starting.", where, reason)
        time.sleep(retry_s)
        retry_s = min(_MAX_RETRY_S, retry_s * 1.2)


def _call(entry: dict[str, Any], hello: _Hello) -> socket.socket:
    connection = connect(entry["address"], int(entry["port"]), _CONNECT_S)
    with closing_on_error(connection):
        connection.settimeout(_ANSWER_S)
        connection.sendall(entry["secret"].encode() + hello.encoded())
        answer = _receive(connection, _SECRET_BYTES)
        if not hmac.compare_digest(answer, entry["answer"].encode()):
            raise ConnectionError("another program answers")
    return connection
