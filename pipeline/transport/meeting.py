"""How the ranks of a group find each other and connect, each to the one after it. Knows no models or jobs.

Each rank writes where it listens into a store that all of them reach. The store outlives ranks: what stands there may
be of ranks that are gone, from an earlier life of the group, and nothing tells, since each host's torchrun counts
restarts for itself. So a connection counts when the other side has proved that it listens now; until then it is looked
up and called again.

The ring is closed one link after the other, beginning at rank 0, and a word of rank 0 goes round with it: when it comes
back, all ranks have met.
"""

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

#: Bytes of what the caller says, of what it is answered, and of rank 0's word.
_WORD_BYTES: Final = 32
#: Seconds that a connection, and then what is said on it, may take.
_CONNECT_S, _ANSWER_S = 5.0, 30.0
#: Seconds between two calls, before a rank tells that it calls in vain, and between two such lines.
_RETRY_S, _TELL_S, _TELL_AGAIN_S = 0.2, 30.0, 300.0
#: Seconds of silence before the kernel asks for a sign of life, seconds between questions, and how many it asks.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_INTERVAL_S, _KEEP_ALIVE_COUNT = 5, 3, 3


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank has when all have met."""

    #: Connected to the rank after this one; from the last one to rank 0.
    following: socket.socket
    #: Connected to the rank before.
    preceding: socket.socket
    #: The same on all ranks, another one in each life of the group.
    word: str


def meet(store: "Store", rank: int, num_ranks: int, address: str) -> Meeting:
    """Meet the other ranks; waits for them as long as they load their models.

    Args:
        store: the same for all ranks.
        rank: this one.
        num_ranks: K, at least two.
        address: the one of this host at which the rank before reaches this one; it is listened at there alone.

    Raises:
        OSError: the others have ended, or begun anew.
    """
    next_name = _name((rank + 1) % num_ranks)
    listener = _Listener(store, _name(rank), address)
    if rank == 0:
        word = secrets.token_hex(_WORD_BYTES // 2)
        following = _connect(store, next_name, word)
        preceding, came_round = listener.accept()
        if came_round != word:
            raise ConnectionError("a rank from before the restart called")
    else:
        preceding, word = listener.accept()
        following = _connect(store, next_name, word)
    return Meeting(following=_configured(following), preceding=_configured(preceding), word=word)


def address_among_hosts(store: "Store", rank: int, elsewhere: int, host: str, port: int) -> str:
    """Find the address of this host that other hosts of the group reach.

    Args:
        store: the same for all ranks.
        rank: this one.
        elsewhere: a rank on another host.
        host: of which all ranks know the name, such as MASTER_ADDR; it may be this one.
        port: any of its.
    """
    address = facing(host, port)
    store.set(f"{_name(rank)}-faces", address)
    if ipaddress.ip_address(address).is_loopback:
        # A host's own name mostly stands for its loopback (/etc/hosts of Debian): look where another one is.
        address = facing(store.get(f"{_name(elsewhere)}-faces").decode(), port)
    return address


def facing(host: str, port: int) -> str:
    """Find the address of this host from which it would call another one; the loopback when that is itself.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # asks for the route and sends nothing
        return str(probe.getsockname()[0])


def _name(rank: int) -> str:
    return f"svdq/rank{rank}"


class _Listener:
    """Waits for the rank before; publishes where, and a secret that only ranks of this group can read."""

    def __init__(self, store: "Store", name: str, address: str) -> None:
        self._secret, self._answer = (secrets.token_hex(_WORD_BYTES // 2).encode() for _ in range(2))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        port = self._socket.getsockname()[1]
        published = {"address": address, "port": port, "secret": self._secret.decode(), "answer": self._answer.decode()}
        store.set(name, json.dumps(published))

    def accept(self) -> tuple[socket.socket, str]:
        """Wait for the rank before; return its connection and rank 0's word. Whoever does not know the secret goes."""
        with self._socket:
            while True:
                connection, _ = self._socket.accept()
                try:
                    if hmac.compare_digest(_receive_word(connection), self._secret):
                        word = _receive_word(connection)
                        connection.sendall(self._answer)
                        return connection, word.decode()
                except OSError:
                    pass
                connection.close()


def _connect(store: "Store", name: str, word: str) -> socket.socket:
    """Connect to the listener that has published itself as `name`; waits until it has."""
    tell_at = time.monotonic() + _TELL_S
    while True:
        where = json.loads(store.get(name))
        try:
            return _call(where, word)
        except OSError as error:
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + _TELL_AGAIN_S
                who = f"{name.rpartition('/')[2]} at {where['address']}, port {where['port']}"
                logger.warning(
                    "This rank calls %s in vain (%s): it still starts, or a firewall is in between.", who, error
                )
        time.sleep(_RETRY_S)


def _call(where: dict[str, str], word: str) -> socket.socket:
    connection = socket.create_connection((where["address"], int(where["port"])), timeout=_CONNECT_S)
    try:
        connection.sendall(where["secret"].encode() + word.encode())
        if not hmac.compare_digest(_receive_word(connection), where["answer"].encode()):
            raise ConnectionError("somebody else answers")
    except OSError:
        connection.close()
        raise
    return connection


def _receive_word(connection: socket.socket) -> bytes:
    """Receive what one side says to the other while they meet."""
    connection.settimeout(_ANSWER_S)
    received = b""
    while len(received) < _WORD_BYTES:
        part = connection.recv(_WORD_BYTES - len(received))
        if not part:
            raise ConnectionError("it closed the connection")
        received += part
    return received


def _configured(connection: socket.socket) -> socket.socket:
    # From now on the wait for a message has no end.
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # Linux's name, macOS's name
    if idle is not None:
        connection.setsockopt(socket.IPPROTO_TCP, idle, _KEEP_ALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_COUNT)
    return connection
