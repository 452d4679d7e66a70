"""The views of the page."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from svdq.cli.serve.access import is_token, log_in

FOLDER = Path(__file__).parent
templates = Jinja2Templates(FOLDER / "templates")


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [
        Route("/", index),
        Route("/login", login, methods=["GET", "POST"]),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]


async def index(request: Request) -> Response:
    """Show the page."""
    return templates.TemplateResponse(request, "index.html")


async def login(request: Request) -> Response:
    """Exchange the token, from the link that `svdq serve` prints or from a form, for the cookie."""
    options = request.app.state.options
    if request.method == "POST":
        async with request.form(max_files=0, max_fields=4, max_part_size=4096) as form:
            given = form.get("token")
    else:
        given = request.query_params.get("token")
    if isinstance(given, str) and is_token(given.strip(), options):
        response = RedirectResponse("/", 303)
        log_in(response, options, is_https=request.url.scheme == "https")
        return response
    return templates.TemplateResponse(
        request, "login.html", {"is_wrong": given is not None}, 200 if given is None else 401
    )
