"""The stream of states: one connection a page, and one read a second for all pages together."""

import asyncio
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from svdq.cli.serve.backend import Backend
from svdq.cli.serve.errors import ApiError
from svdq.cli.serve.now import outage, read_state
from svdq.cli.serve.sharing import FRESH_S, Shared
from svdq.producer.status.snapshot import Snapshot

#: Seconds after which the send to a page that does not read any more is given up.
SEND_TIMEOUT_S = 30


def shared_states(backend: Backend, snapshots: Shared[None, Snapshot]) -> Shared[None, str]:
    """Return the state of all pages, read once a second while any page is open."""

    async def read(_key: None) -> str:
        snapshot = await snapshots.get(None)
        return await backend.read(
            lambda connection: read_state(connection, backend.settings, backend.storage, snapshot)
        )

    return Shared(read)


async def events(request: Request) -> Response:
    """Stream the state to a page, now and each second."""
    states: Shared[None, str] = request.app.state.page_states

    async def stream() -> AsyncIterator[ServerSentEvent]:
        while True:
            try:
                text = await states.get(None)
            except ApiError as error:
                text = outage(str(error))
            yield ServerSentEvent(text, event="state")
            await asyncio.sleep(FRESH_S)

    return EventSourceResponse(stream(), send_timeout=SEND_TIMEOUT_S)


async def alive(_request: Request) -> Response:
    """Answer a page that has lost its stream and tries again."""
    return JSONResponse({"alive": True})
