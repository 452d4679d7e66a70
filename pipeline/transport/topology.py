"""Which rank of its group a process is, and its links to its neighbors.

The ranks of a group form a ring of Unix sockets in a private folder, each connected to the next one. Samples go from
rank to rank down the chain; reports go back from the last rank to rank 0. The ring is closed one link after the other,
starting at rank 0, from which a hello travels along it: each rank adds its information, and listens no more.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.transport.links import Channel

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH: Final = 103  # largest length of a Unix socket's path in bytes: 107 on Linux, 103 on macOS
_RETRY_S, _WARN_S = 0.2, 60.0  # seconds between two attempts to connect, and of failed attempts between two warnings


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which rank of its group a process is."""

    rank: int  # rank 0 takes jobs
    num_ranks: int  # number of ranks K; rank K-1 writes videos

    @classmethod
    def from_torchrun(cls) -> Self:
        """Read torchrun's environment; without it, a group of one. Raises InputError if ranks are on several hosts."""
        environment = os.environ
        if environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE"):
            raise InputError("A group runs on one host; start one on each host, and they share the queue.")
        return cls(rank=int(environment.get("RANK", "0")), num_ranks=int(environment.get("WORLD_SIZE", "1")))

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last rank; a rank alone is both."""
        return self.rank == self.num_ranks - 1


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's channels to its neighbors; a single rank has none."""

    incoming: Channel | None = None  # from the rank before; on rank 0 from the last rank, for reports
    outgoing: Channel | None = None  # to the next rank; on the last rank to rank 0
    rank_info: tuple[str, ...] = ()  # rank 0 first: on rank 0 of all, elsewhere up to this rank


def join(topology: Topology, device: torch.device, *, folder: Path, rank_info: str = "") -> Links:
    """Connect to the neighbors, once they have loaded their models; `rank_info` is for rank 0. Raises as `agree`."""
    if topology.num_ranks == 1:
        return Links(rank_info=(rank_info,))
    following, preceding, known = _close_ring(topology, folder, rank_info)
    return Links(incoming=Channel(preceding, device), outgoing=Channel(following, device), rank_info=tuple(known))


def agree(topology: Topology, rank_info: str, decide: Callable[[tuple[str, ...]], str], *, folder: Path) -> str:
    """Return what rank 0 decides from the information of all ranks, before they load their models.

    `decide` is called on rank 0 alone, with the `rank_info` of all ranks in order; only this user can enter `folder`.
    Raises OSError if the other ranks have ended, and InputError if the path of the socket is too long.
    """
    if topology.num_ranks == 1:
        return decide((rank_info,))
    following, preceding, known = _close_ring(topology, folder, rank_info)
    with following, preceding:
        text: str = decide(tuple(known)) if topology.first else _receive(preceding)
        if not topology.last:
            _send(following, text)
    return text


def _close_ring(topology: Topology, folder: Path, rank_info: str) -> tuple[socket.socket, socket.socket, list[str]]:
    """Return the connections to the next rank and from the one before, and the information of the ranks up to this."""
    path = _path(folder, topology.rank)
    path.unlink(missing_ok=True)  # from an earlier start
    listener = socket.socket(socket.AF_UNIX)
    with _short(path) as name:
        listener.bind(name)
    listener.listen()
    following = None
    if topology.first:
        following = _connect(folder, 1)
        _send(following, [rank_info])
    # The listener is closed at once: after `agree`, the rank before must not reach it again.
    with listener:
        preceding, _ = listener.accept()
        path.unlink()
    known: list[str] = _receive(preceding)
    if following is None:
        known.append(rank_info)
        following = _connect(folder, (topology.rank + 1) % topology.num_ranks)
        _send(following, known)
    return following, preceding, known


def _connect(folder: Path, rank: int) -> socket.socket:
    """Connect to a rank; waits until it listens."""
    warn_at = time.monotonic() + _WARN_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with _short(_path(folder, rank)) as name:
                connection.connect(name)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + _WARN_S
                logger.warning("Cannot connect to rank %d (%s), retrying. It may still be starting.", rank, error)
        time.sleep(_RETRY_S)


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    # What the file reads ahead is not lost: nothing follows before the value has gone around the ring.
    with connection.makefile("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("it closed the connection")
    return json.loads(line)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.sock"


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short name for the path of a socket, so that any length fits; raises InputError if there is none."""
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
