"""The sockets between ranks: Unix sockets on one host, TCP between hosts."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from svdq.pipeline.errors import InputError

#: Seconds of silence before the kernel probes the other host, seconds between probes, and number of probes.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_INTERVAL_S, _KEEP_ALIVE_COUNT = 5, 3, 3
#: Buffer of a Unix socket in bytes: a sample of 1024x576 with 25 frames has 2 MB.
_SEND_BUFFER_BYTES: Final = 4 << 20
#: Largest length of a Unix socket's path in bytes: 107 on Linux, 103 on macOS.
_MAX_SOCKET_PATH: Final = 103


def is_path(address: str) -> bool:
    """Return whether an address is the path of a Unix socket, not an IP address."""
    return address.startswith("/")


def listen(address: str) -> tuple[socket.socket, int]:
    """Listen at an address of this host; return the socket and its TCP port, 0 for a Unix socket.

    Raises:
        InputError: the path of the socket is too long.
    """
    if not is_path(address):
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        return listener, int(listener.getsockname()[1])
    path = Path(address)
    path.unlink(missing_ok=True)  # from an earlier start
    listener = socket.socket(socket.AF_UNIX)
    with closing_on_error(listener), _short(path) as name:
        listener.bind(name)
        listener.listen()
    return listener, 0


def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a listener.

    Raises:
        OSError: nobody listens there.
    """
    if not is_path(address):
        return socket.create_connection((address, port), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    with closing_on_error(connection), _short(Path(address)) as name:
        connection.settimeout(timeout_s)
        connection.connect(name)
    return connection


def facing(host: str, port: int) -> str:
    """Return the local address used to reach another host; loopback if that is this host.

    Raises:
        OSError: the host does not exist, or is not reachable.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # selects the route without sending anything
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def closing_on_error(connection: socket.socket) -> Iterator[None]:
    """Close a socket if the block fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


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


def configure(connection: socket.socket) -> socket.socket:
    """Configure a connection to wait for messages without a timeout and to detect a lost host; return it."""
    # Waiting for a message has no timeout from now on.
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        # The kernel may grant less. What fits is sent at once; otherwise a thread is woken for the rest.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux's name, macOS's name
    if idle is not None:
        connection.setsockopt(socket.IPPROTO_TCP, idle, _KEEP_ALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_COUNT)
    return connection
