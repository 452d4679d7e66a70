"""What a server is started with."""

import ipaddress
import re
import socket
from dataclasses import dataclass

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one server."""

    #: Address to listen on: an IP address or `localhost`.
    host: str = "127.0.0.1"
    #: Port that it listens on.
    port: int = 8765
    #: The secret that every client must have.
    token: str
    #: More names by which clients may address the server, such as that of a reverse proxy; lower case.
    allowed_hosts: tuple[str, ...] = ()
    #: Origins such as https://videos.example.com, or `*`, whose pages may use the API with the token.
    allowed_origins: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            name = socket.gethostname()
        return f"http://{name}:{self.port}"

    def accepts_host(self, name: str) -> bool:
        """Return whether requests may be addressed to a host (without port), which no page of a rebound name may."""
        name = name.lower().rstrip(".")
        if name in (self.host.lower(), *self.allowed_hosts) or is_loopback(name):
            return True
        # No DNS name leads to an address that is written in digits, so such requests are not rebound.
        return not self.is_local and (is_address(name) or name == socket.gethostname().lower())


def is_host(text: str) -> bool:
    """Return whether a text is the name of a host or its IP address, without a port."""
    return _NAME.fullmatch(text) is not None or is_address(text)


def is_origin(text: str) -> bool:
    """Return whether a text is an origin of pages as browsers write it, or `*` for all."""
    return text == "*" or _ORIGIN.fullmatch(text) is not None


def is_address(host: str) -> bool:
    """Return whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine only."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
