"""The views of `/v1/videos`, `/v1/models` and `/health`."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route


def routes() -> list[BaseRoute]:
    """Return the routes of the API."""
    return [
        Route("/health", health),
        Route("/health/live", live),
    ]


async def health(request: Request) -> Response:
    """Answer 200 while Redis can be reached, and 503 otherwise."""
    await request.app.state.snapshots.get(None)
    return JSONResponse({"status": "ok"})


async def live(_request: Request) -> Response:
    """Answer 200 while the server runs."""
    return JSONResponse({"status": "ok"})
