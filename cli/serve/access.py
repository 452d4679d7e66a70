"""Who may send a request, and from where: host, origin, token or cookie; and the headers of every response."""

import ipaddress
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from svdq.cli.serve.api_errors import ApiError, no_token, request_id
from svdq.cli.serve.tokens import Tokens, address_of_machine

#: Paths that need no token, besides static files: probes, and the login.
OPEN_PATHS = ("/health", "/health/live", "/login")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
#: A Host header: a name, or an IPv6 address in brackets; and a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?", re.ASCII)
COOKIE_MAX_AGE_S = 90 * 24 * 60 * 60  # seconds that a browser keeps the cookie

#: Sent with every response. Referrer-Policy is not `no-referrer`, with which browsers send `Origin: null`.
RESPONSE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self'; "
        "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_NAME = re.compile(r"[\w.-]+", re.ASCII)
ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one server."""

    #: Address to listen on: an IP address or `localhost`.
    host: str = "127.0.0.1"
    port: int = 8765
    tokens: Tokens
    #: More names by which clients may address the server, such as the name of a reverse proxy; lower case.
    allowed_hosts: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The address for a browser: on this machine, or on any in its network if the server listens there."""
        name = self.host
        if self.host in ANY_ADDRESS:  # phones do not resolve names of machines
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            name = address_of_machine(family) or socket.gethostname()
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return _is_loopback(self.host)

    @property
    def cookie_name(self) -> str:
        """The name of the cookie: cookies do not depend on the port, so two servers need two names."""
        return f"svdq_{self.port}"

    def owner_of(self, request: HTTPConnection) -> str | None:
        """Return the name of the token of a request, "" for the one without a name; None if there is none."""
        if (token := _bearer(request)) is not None:
            return self.tokens.name_of(token)
        # Any other scheme is a proxy's own login, which browsers send along.
        return self.tokens.name_of_cookie(request.cookies.get(self.cookie_name, ""))

    def accepts_host(self, name: str) -> bool:
        """Return whether requests may be addressed to a host (without port): DNS rebinding cannot lead to it."""
        name = name.lower().rstrip(".")
        if name in (self.host.lower(), *self.allowed_hosts) or _is_loopback(name):
            return True
        # No DNS name leads to an address that is written in digits, so such requests are not rebound.
        return not _is_loopback(self.host) and (_is_address(name) or name == socket.gethostname().lower())


def is_host(text: str) -> bool:
    """Return whether a text is the name of a host or its IP address, without a port."""
    return _NAME.fullmatch(text) is not None or _is_address(text)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Access:
    """Middleware that refuses requests before anything of their body is read."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and add the headers to its response."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id.set(uuid.uuid4().hex)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
                headers["X-Request-Id"] = request_id.get()
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """Return the response to a request that may not go on."""
        # Not the path of `request.url`, which older versions of Starlette take from the Host header.
        method, path = request.scope["method"], request.scope["path"]
        if not _is_addressed_to(request.headers, self._options):
            message = "The request names another host; name it with `svdq serve --allow-host` if it is this one."
            return ApiError(400, message, code="unknown_host").response()
        # A page of another site can make a browser send the cookie, but no token.
        if method not in SAFE_METHODS and _bearer(request) is None and not _is_same_origin(request.headers):
            message = "The request comes from a page of another site; use the page of this server."
            return ApiError(403, message, code="cross_origin").response()
        if path in OPEN_PATHS or path.startswith("/static/"):
            return None
        owner = self._options.owner_of(request)
        if owner is not None:
            request.scope.setdefault("state", {})["owner"] = owner
            return None
        if method in SAFE_METHODS and not path.startswith("/v1/") and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return no_token().response()


def _bearer(request: HTTPConnection) -> str | None:
    """Return the token that a program sends, right or wrong."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _is_addressed_to(headers: Headers, options: ServeOptions) -> bool:
    hosts = headers.getlist("host")
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return found is not None and options.accepts_host(found["address"] or found["name"])


def _is_same_origin(headers: Headers) -> bool:
    """Return whether a write comes from a page of this server, or from no page at all."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    if origin is None:
        return True
    # The scheme is not compared: behind a proxy with TLS the server itself has http.
    return origin.partition("://")[2].lower() == headers.get("host", "").lower() != ""


def mine_of(request: HTTPConnection) -> tuple[str, str]:
    """Return the owners whose videos are the visitor's: videos without an owner are everybody's."""
    return request.state.owner or request.app.state.backend.settings.owner, ""


def wanted_owners(request: HTTPConnection) -> tuple[str, ...]:
    """Return the owners that a list is asked for; () for all."""
    return mine_of(request) if request.query_params.get("whose") == "mine" else ()
