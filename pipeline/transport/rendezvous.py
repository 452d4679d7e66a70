"""Connects the ranks of a group into a ring, each rank to the next one, through Unix sockets in a private folder.

The ring is closed one link after the other, starting at rank 0. A hello from rank 0 travels along it, to which each
rank adds information for rank 0. When it returns, all ranks are connected and no rank listens any more.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from svdq.pipeline.errors import InputError

logger = logging.getLogger(__name__)

#: The length of a text, before it.
_LENGTH: Final = struct.Struct("!I")
#: Buffer of a connection in bytes: a sample of 1024x576 with 25 frames has 2 MB. The kernel may grant less. What fits
#: is sent at once; otherwise a thread is woken for the rest.
_SEND_BUFFER_BYTES: Final = 4 << 20
#: Largest length of a Unix socket's path in bytes: 107 on Linux, 103 on macOS.
_MAX_SOCKET_PATH: Final = 103
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


def close_ring(folder: Path, rank: int, num_ranks: int, rank_info: str = "") -> Ring:
    """Connect to the other ranks; waits while they load their models.

    Args:
        folder: the same for all ranks of the group; only this user may enter it.
        rank: this rank.
        num_ranks: K, at least two.
        rank_info: what rank 0 is to know of this rank.

    Raises:
        OSError: the others have ended.
        InputError: the path of the socket is too long.
    """
    next_rank = (rank + 1) % num_ranks
    listener = _listen(folder, rank)
    if rank == 0:
        following = _connect(folder, next_rank)
        _send(following, json.dumps([rank_info]))
        preceding, known = _accept(listener, folder, rank)
    else:
        preceding, known = _accept(listener, folder, rank)
        known.append(rank_info)
        following = _connect(folder, next_rank)
        _send(following, json.dumps(known))
    return Ring(following=following, preceding=preceding, rank_info=tuple(known))


def agree(folder: Path, rank: int, num_ranks: int, rank_info: str, decide: Callable[[tuple[str, ...]], str]) -> str:
    """Return what rank 0 decides from the information of all ranks; waits for all ranks. Leaves no connection.

    `decide` is called on rank 0 alone, with the `rank_info` of all ranks in order; the rest is as for `close_ring`.

    Raises:
        OSError: the others have ended.
        InputError: the path of the socket is too long.
    """
    ring = close_ring(folder, rank, num_ranks, rank_info)
    with ring.following, ring.preceding:
        text = decide(ring.rank_info) if rank == 0 else _receive(ring.preceding)
        if rank < num_ranks - 1:
            _send(ring.following, text)
    return text


def _accept(listener: socket.socket, folder: Path, rank: int) -> tuple[socket.socket, list[str]]:
    """Wait for the previous rank; return its connection and the information of the ranks up to it.

    The listener is closed at once: when `agree` is over, the previous rank must not reach it again.
    """
    with listener:
        connection, _ = listener.accept()
        _path(folder, rank).unlink()
    known: list[str] = json.loads(_receive(connection))
    return _configured(connection), known


def _connect(folder: Path, rank: int) -> socket.socket:
    """Connect to a rank; waits until it listens."""
    warn_at = time.monotonic() + _WARN_S
    retry_s = _RETRY_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with _short(_path(folder, rank)) as name:
                connection.connect(name)
            return _configured(connection)
        except OSError as error:
            connection.close()
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + _WARN_AGAIN_S
                logger.warning("Cannot connect to rank %d (%s), retrying. It may still be starting.", rank, error)
        time.sleep(retry_s)
        retry_s = min(_MAX_RETRY_S, retry_s * 1.2)


def _send(connection: socket.socket, text: str) -> None:
    data = text.encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> str:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return _receive_exactly(connection, length).decode()


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.sock"


def _listen(folder: Path, rank: int) -> socket.socket:
    """Listen for the previous rank."""
    _path(folder, rank).unlink(missing_ok=True)  # from an earlier start
    listener = socket.socket(socket.AF_UNIX)
    with _short(_path(folder, rank)) as name:
        listener.bind(name)
    listener.listen()
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name for the path of a socket, so that a path of any length fits into its address.

    Raises:
        InputError: the path is too long, and this system has no other name for it.
    """
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise InputError(f"The path {str(path)!r} is too long for a socket; set SVDQ_HOME to a shorter one.")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _configured(connection: socket.socket) -> socket.socket:
    """Give a connection a large buffer; return it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return connection
