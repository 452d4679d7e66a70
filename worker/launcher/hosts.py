"""A group over several hosts: the options of torchrun, and where ranks find each other. Does not import torch.

Every host runs its own launcher and torchrun. One host keeps torchrun's store. The ranks do not use it: they publish
their addresses in Redis, which can have a password.
"""

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.transport.sockets import facing
from svdq.producer import keys
from svdq.producer.process_identity import group_name
from svdq.producer.settings import Settings
from svdq.worker.redis_client import connect

#: Default port of the store, as in torchrun.
DEFAULT_PORT = 29400
#: Seconds that a host waits for the others before its torchrun gives up and is started again.
JOIN_S = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one group."""

    #: Number of hosts.
    num: int
    #: Name or address of the host that keeps the store, for all hosts.
    store_host: str
    #: The store's port.
    store_port: int
    #: Name or address of this host for the others.
    own_address: str
    #: Whether this host keeps the store; None: torchrun finds out.
    keeps_store: bool | None

    def torchrun_options(self) -> list[str]:
        """Return the options of the rendezvous."""
        is_host = "" if self.keeps_store is None else f",is_host={int(self.keeps_store)}"
        return [
            *("--nnodes", str(self.num), "--rdzv-backend", "c10d", "--local-addr", self.own_address),
            *("--rdzv-endpoint", f"{self.store_host}:{self.store_port}"),
            *("--rdzv-id", f"svdq-{self.store_host}-{self.store_port}"),  # names the group, also in `svdq top`
            *("--rdzv-conf", f"join_timeout={JOIN_S}{is_host}"),
        ]

    @property
    def warning(self) -> str:
        """Describe which ports are open while the group runs, and to whom."""
        keeper = f"{self.store_host} (not this host)" if self.keeps_store is False else self.store_host
        return (
            f"Open to the network: torchrun's rendezvous at port {self.store_port} of {keeper}, at all its addresses. "
            "It has no password: whoever reaches it can run code as this user. While ranks start, each also listens at "
            f"a port of {self.own_address}, protected by a secret from Redis. Admit only the hosts of this group."
        )


class RedisBook:
    """Keeps the addresses of a group's ranks in Redis; callers retry, so errors of Redis are ignored."""

    def __init__(self, connection: redis.Redis, group: str) -> None:
        self._connection = connection
        self._group = group

    def publish(self, name: str, entry: str) -> None:
        """Write an entry, replacing an older one."""
        with contextlib.suppress(redis.RedisError):
            self._connection.set(self._key(name), entry, ex=keys.RENDEZVOUS_TTL_S)

    def look_up(self, name: str) -> str | None:
        """Read an entry; None while there is none."""
        try:
            entry = self._connection.get(self._key(name))
        except redis.RedisError:
            return None
        return entry.decode() if isinstance(entry, bytes) else None

    def _key(self, name: str) -> str:
        return f"{keys.RENDEZVOUS}{self._group}:{name}"


def address_book(settings: Settings, *, on_one_host: bool) -> RedisBook | None:
    """Return the address book of a group over several hosts; None for a group on one host.

    Raises:
        InputError: SVDQ_REDIS_URL is not set.
    """
    if on_one_host:
        return None
    if not settings.redis_url:
        raise InputError("A group over several hosts needs a Redis that all of them reach; set SVDQ_REDIS_URL.")
    return RedisBook(connect(settings.redis_url), group_name(on_one_host=False))


def read_hosts(settings: Settings, num: int, endpoint: str | None, num_groups: int) -> Hosts | None:
    """Check the options of a group over several hosts, `--nnodes` and `--rdzv-endpoint`; None for a group on one host.

    Raises:
        InputError: the options cannot be used together.
        UnavailableError: there is no route to the endpoint.
    """
    if num == 1:
        if endpoint is not None:
            raise InputError("--rdzv-endpoint is for a group over several hosts; say how many with --nnodes.")
        return None
    if endpoint is None:
        raise InputError(f"--nnodes {num} needs --rdzv-endpoint HOST:PORT, the same on every host, their rendezvous.")
    if num_groups > 1:
        raise InputError(f"--nnodes {num} makes one group over {num} hosts; leave out --groups.")
    if not settings.redis_url:
        raise InputError(f"--nnodes {num} needs a Redis that all {num} hosts reach; set SVDQ_REDIS_URL or --redis-url.")
    host, colon, port = endpoint.rpartition(":")
    if not colon:
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"--rdzv-endpoint {endpoint!r} is not HOST:PORT, such as render1:{DEFAULT_PORT}.")
    try:
        own_address = facing(host.strip("[]"), int(port))
        store_addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), int(port))}
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name, such as a..b
        raise UnavailableError(f"There is no way to --rdzv-endpoint {endpoint} from here: {error}.") from error
    keeps_store: bool | None = own_address in store_addresses
    if ipaddress.ip_address(own_address).is_loopback:
        # This host keeps the store under the name that the others use; or all hosts are this one, for a trial.
        own_address, keeps_store = host, None
    return Hosts(num=num, store_host=host, store_port=int(port), own_address=own_address, keeps_store=keeps_store)
