"""The application: state, middleware and routes of the page and the API."""

import asyncio
import contextlib
import ctypes
import resource
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from svdq.cli.main import StopSignals
from svdq.cli.serve import api, mcp_endpoint, page
from svdq.cli.serve.access import Access, ServeOptions
from svdq.cli.serve.api_errors import ANSWERED, answer_error
from svdq.cli.serve.backend import Backend, Shared
from svdq.cli.serve.bodies import FormReader
from svdq.cli.serve.content import Content
from svdq.cli.serve.mcp_endpoint import McpEndpoint
from svdq.cli.serve.now import read_state
from svdq.cli.serve.review import StoredVideos
from svdq.pipeline.errors import InputError, SvdqError, UnavailableError
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView
from svdq.producer.status.running import read_running
from svdq.producer.status.snapshot import Recent, take
from svdq.producer.status.video_costs import Parameters


def make_app(settings: Settings, options: ServeOptions, on_ready: Callable[[], None]) -> Starlette:
    """Create the application of a server; it calls `on_ready` when it is about to answer."""
    backend = Backend(settings)
    sampled: Recent[Parameters] = Recent()
    shown: Recent[JobView] = Recent()

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        with contextlib.suppress(UnavailableError):  # requests are answered with 503 until it is back
            await backend.in_thread(backend.storage.sweep)
        on_ready()
        yield

    async def read_page_state() -> dict[str, Any]:
        snapshot = await app.state.snapshots.get()
        state = (backend.storage, snapshot, settings.model, shown)
        return await backend.read(lambda connection: read_state(connection, *state))

    app = Starlette(
        routes=[*api.routes(), Route(mcp_endpoint.PATH, McpEndpoint()), *page.routes()],
        middleware=[Middleware(Access, options=options)],
        exception_handlers=dict.fromkeys(ANSWERED, answer_error),
        lifespan=lifespan,
    )
    app.state.options = options
    app.state.backend = backend
    app.state.snapshots = Shared(lambda: backend.read(partial(take, recent=sampled)))
    app.state.models = Shared(lambda: backend.read(lambda connection: read_running(connection).models))
    app.state.older = StoredVideos(backend.storage)
    app.state.content = Content(backend, app.state.older)
    app.state.reader = FormReader(settings.max_pixels)
    #: Places in the list of videos at which pages have ended, by the id of their last video.
    app.state.page_ends = {}
    app.state.page_states = Shared(read_page_state)
    return app


HEADERS_S = 15.0  # seconds in which the headers of a request must arrive, and the rest of a body after the answer
#: Connections at a time, above which the slowest without a token makes room. Its request ends a moment later, so
#: uvicorn answers with 503 from a tenth more on.
MAX_CONNECTIONS = 1000
_M_MMAP_THRESHOLD = -3  # an option of glibc's mallopt, from malloc.h
GRACE_S = 2  # seconds that running requests have after a signal


class _Protocol(H11Protocol):
    """One connection, closed when headers or the rest of a refused request, which is read, do not arrive in time.

    When there are too many, those without a request that has a token make room: clients that nobody knows may be slow
    to send, or to read.
    """

    #: All connections, first the one that has not sent anything for the longest time.
    _open: ClassVar[dict["_Protocol", None]] = {}
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) >= MAX_CONNECTIONS:
            for other in self._open:
                if not other._has_token():
                    del self._open[other]
                    other.transport.abort()
                    break
        self._open[self] = None
        self._limit_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._open.pop(self, None)
        self._open[self] = None
        super().data_received(data)
        self._limit_time()

    def _has_token(self) -> bool:
        """Return whether a request with a token is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and "owner" in self.scope["state"]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._limit_time()

    def _limit_time(self) -> None:
        if not self._is_waiting():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._too_slow)

    def _is_waiting(self) -> bool:
        """Return whether headers are due, or the rest of a body after its answer."""
        theirs = self.conn.their_state
        return theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing() and self._is_waiting():
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 takes a free one; raises InputError if the address cannot be used."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only on sockets that name their protocol, and without it the body of
        # a response waits for the client's delayed acknowledgement of its head: 40 ms on a kept connection.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"The server cannot listen on {host} port {port} ({reason}); give another --port.") from error


def run(app: Starlette, listener: socket.socket) -> int:
    """Serve until SIGINT or SIGTERM, for at most three seconds more, and return the signal; may raise SvdqError."""

    async def run_app(scope: Scope, receive: Receive, send: Send) -> None:
        # Downloads that outlast the grace end without a traceback in the log; only uvicorn cancels, at its end.
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    config = uvicorn.Config(
        run_app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # addresses contain tokens
        server_header=False,
        h11_max_incomplete_event_size=32 * 1024,
        limit_concurrency=MAX_CONNECTIONS + MAX_CONNECTIONS // 10,
        timeout_graceful_shutdown=GRACE_S,
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each upload has a connection and a file
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # glibc returns large blocks to the system when they are freed; by default it keeps some for each thread.
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    server = uvicorn.Server(config)
    with StopSignals() as stop:
        with contextlib.suppress(KeyboardInterrupt):  # the second Ctrl-C
            server.run(sockets=[listener])
        if not server.started and not stop.number:
            raise SvdqError("The server has not started; the lines above say why.")
        return stop.number
