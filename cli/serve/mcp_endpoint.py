"""`/mcp`: agents send requests of the Model Context Protocol here; its SDK is imported at the first one."""

import asyncio
import contextlib
import importlib
from tempfile import SpooledTemporaryFile
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.bodies import MAX_SMALL_BYTES, PHOTO_S, SPOOLED_BYTES, limited
from svdq.cli.serve.fields import check_num_values

PATH = "/mcp"
MAX_BYTES = 16 << 20  # bytes of a body, in which a photo is a data URL; it takes ten times as much memory
LARGE = "is_large_request"  # in a request's state: others with large bodies wait for its end


class McpEndpoint:
    """An ASGI application that answers POST; it keeps no sessions, so there is nothing to GET or DELETE."""

    def __init__(self) -> None:
        self._server: Any = None
        self._large = asyncio.Lock()  # held while a large body is in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError and HTTPException."""
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        try:
            module = await asyncio.to_thread(importlib.import_module, "svdq.cli.serve.mcp_server")
        except ModuleNotFoundError as error:
            raise ApiError(404, "This server does not speak MCP: its extra `mcp` is not installed.") from error
        self._server = self._server or module.make_server()
        request = limited(Request(scope, receive), MAX_BYTES, PHOTO_S, "send a smaller photo")
        with SpooledTemporaryFile(max_size=SPOOLED_BYTES) as file:
            async for chunk in request.stream():
                file.write(chunk)
            is_large = file.tell() > MAX_SMALL_BYTES
            async with self._large if is_large else contextlib.nullcontext():
                scope["state"][LARGE] = is_large
                file.seek(0)
                await module.answer(self._server, scope, _replaying(file.read(), receive), send)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body; raises ApiError for one with too many values."""
    try:
        check_num_values(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON ({error}).", code="bad_json") from error
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
