"""The page: its addresses, its first answer, and the login."""

import hashlib
from pathlib import Path
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from svdq.cli.serve import page_actions, page_form, page_videos
from svdq.cli.serve.access import COOKIE_MAX_AGE_S, mine_of
from svdq.cli.serve.api import live
from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.bodies import limited
from svdq.cli.serve.form import families, fields
from svdq.cli.serve.now import events
from svdq.cli.serve.tokens import cookie_of
from svdq.pipeline.models.families import PARAMETERS
from svdq.pipeline.models.lora_folder import LoraFolder
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.job import JOBS
from svdq.producer.status.registries import read_several_owners
from svdq.producer.status.running import Running, read_running
from svdq.producer.submitting.sources import SUFFIXES, SYSTEM_FOLDERS
from svdq.producer.together import ask_one

FOLDER = Path(__file__).parent
#: The address of the static files changes with them, so that browsers keep them for good.
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((FOLDER / "static").iterdir())))
STATIC = f"/static/{_DIGEST.hexdigest()[:12]}"
templates = Jinja2Templates(FOLDER / "templates")
templates.env.globals["static"] = STATIC

#: What browsers say of a link that no other site has opened; they say nothing to a server without TLS elsewhere.
_OWN_SITES = ("none", "same-origin")
MAX_LOGIN_BYTES = 8 << 10  # bytes of a login, which anybody on the network may send


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [
        Route("/", index),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route("/page/events", events),
        Route("/page/alive", live),  # 401 to a page whose cookie is not valid any more
        Route("/page/estimate", page_form.estimate),
        Route("/page/photos", page_form.add, methods=["POST"]),
        Route("/page/picture/{video_id}", page_videos.picture),
        Route("/page/photo/{video_id}", page_videos.photo),
        Route("/page/preview/{video_id}", page_videos.preview),
        Route("/page/content/{video_id}", page_videos.content),
        Route("/page/results", page_videos.results),
        Route("/page/results/{video_id}", page_videos.result),
        Route("/page/waiting", page_videos.waiting),
        Route("/page/others", page_videos.others),
        Route("/page/left", page_videos.left),
        Route("/page/progress", page_videos.progress),
        Route("/page/verdicts", page_actions.verdicts, methods=["POST"]),
        Route("/page/actions", page_actions.act, methods=["POST"]),
        Route("/page/repeat", page_actions.repeat, methods=["POST"]),
        Route("/page/zip", page_videos.download, methods=["POST"]),
        Mount(STATIC, GZipMiddleware(_Lasting(directory=FOLDER / "static"))),
    ]


class _Lasting(StaticFiles):
    """Static files under an address with their hash."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a response that browsers keep for a year."""
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


async def index(request: Request) -> Response:
    """Show the page."""
    state = request.app.state
    try:
        running = await state.backend.read(read_running)
        several_owners = await state.backend.read(lambda connection: ask_one(connection, read_several_owners()))
    except ApiError:  # the page says itself that Redis is away
        running, several_owners = Running(), False
    models = running.models
    defaults = {name: model.facts.get("defaults", {}) for name in JOBS if (model := running.known(name))}
    loras = running.loras | await state.backend.in_thread(LoraFolder(state.backend.settings.loras).digests)
    names = await state.backend.in_thread(lambda: families(models, state.backend.settings.model))
    known = [
        {
            "name": name,
            "title": PARAMETERS[name].title,
            "fields": fields(name, defaults.get(name, {}), loras.keys()),
            "takes_last_photo": "last_image" in JOBS[name].model_fields,
        }
        for name in dict.fromkeys([*names, *JOBS])
    ]
    given = {
        "families": known,
        "num_offered": len(names),
        "models": sorted(map(model_stem, models)),
        "suffixes": sorted(SUFFIXES),
        "system_folders": sorted(SYSTEM_FOLDERS),
        "output": state.backend.settings.output,
        "several_owners": several_owners,
        "owner": mine_of(request)[0],
        "whose": "mine" if request.state.owner else "everybody",
    }
    return templates.TemplateResponse(request, "index.html", given)


async def login(request: Request) -> Response:
    """Exchange the token, from the link that `svdq serve` prints or from a form, for the cookie."""
    options = request.app.state.options
    if request.method == "POST":
        async with limited(request, MAX_LOGIN_BYTES).form(max_files=0, max_fields=4) as form:
            given = form.get("token")
    else:
        given = request.query_params.get("token")
    token = given.strip() if isinstance(given, str) else ""
    name = options.tokens.name_of(token)
    if name is not None and request.method == "GET" and request.headers.get("sec-fetch-site") not in _OWN_SITES:
        # A page of another site may have sent the browser here, to log its visitor in as somebody else.
        known = {"token": token, "name": name or "the owner of this server"}
        return templates.TemplateResponse(request, "login.html", known)
    if name is not None:
        response = RedirectResponse("/", 303)
        is_https = request.url.scheme == "https"
        response.set_cookie(
            options.cookie_name,
            cookie_of(token),
            max_age=COOKIE_MAX_AGE_S,
            secure=is_https,
            httponly=True,
            samesite="strict",
        )
        return response
    return templates.TemplateResponse(
        request, "login.html", {"is_wrong": given is not None}, 200 if given is None else 401
    )


async def logout(request: Request) -> Response:
    """Have the browser forget the cookie; the token stays valid."""
    response = RedirectResponse("/login", 303)
    response.delete_cookie(request.app.state.options.cookie_name, httponly=True, samesite="strict")
    return response
