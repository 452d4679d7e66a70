"""The application: state, middleware and routes of the page and the API."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from svdq.cli.serve import api, page
from svdq.cli.serve.access import Access
from svdq.cli.serve.backend import Backend
from svdq.cli.serve.bodies import Bodies, Reader
from svdq.cli.serve.content import Content, sweep
from svdq.cli.serve.errors import ANSWERED, answer_error
from svdq.cli.serve.now import shared_states
from svdq.cli.serve.older import Older
from svdq.cli.serve.options import ServeOptions
from svdq.cli.serve.sharing import Polls, Shared
from svdq.producer.settings import Settings
from svdq.producer.status.snapshot import Snapshot, take

#: Headers that a page of another site may read.
EXPOSED_HEADERS = ("X-Request-Id", "Openai-Poll-After-Ms", "Retry-After", "Content-Disposition", *api.SYNC_HEADERS)


def make_app(settings: Settings, options: ServeOptions) -> Starlette:
    """Create the application of a server."""
    backend = Backend(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await backend.in_thread(lambda: sweep(backend.storage))
        yield
        backend.close()

    async def read_snapshot(_key: None) -> Snapshot:
        return await backend.read(take)

    middleware = [Middleware(Access, options=options), Middleware(Bodies)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=[*api.routes(), *page.routes()],
        middleware=middleware,
        exception_handlers=dict.fromkeys(ANSWERED, answer_error),
        lifespan=lifespan,
    )
    app.state.options = options
    app.state.backend = backend
    app.state.snapshots = Shared(read_snapshot)
    app.state.polls = Polls(backend)
    app.state.pages = Shared(api.PageReader(backend))
    app.state.content = Content(backend)
    app.state.reader = Reader(settings.max_pixels)
    #: Videos that are being removed while nobody waits for it, by id.
    app.state.removals = {}
    app.state.older = Older(backend.storage)
    app.state.page_states = shared_states(backend, app.state.snapshots)
    return app
