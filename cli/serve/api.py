"""The views of `/v1/videos`, `/v1/models` and `/health`."""

import hashlib
import secrets
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from svdq.cli.serve.actions import remove
from svdq.cli.serve.content import Content, not_ready
from svdq.cli.serve.creation import create, make_again, options_of
from svdq.cli.serve.errors import ApiError, Json, no_such_video
from svdq.cli.serve.fields import VideoRequest, decode_data_url, read_request
from svdq.cli.serve.sharing import Polled, estimate_pending
from svdq.cli.serve.videos import JOB_ID, model_stem, video_object
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.paging import Place, place_of, read_page
from svdq.producer.status.status import JobView
from svdq.producer.submitting.options import SEED_BITS
from svdq.producer.submitting.submit import Submission

MAX_PAGE = 100
#: Ends of pages that are remembered: their jobs may be deleted before the next page is asked for.
MAX_ENDS = 1000


def routes() -> list[BaseRoute]:
    """Return the routes of the API."""
    return [
        Route("/health", health),
        Route("/health/live", live),
        Route("/v1/models", list_models),
        Route("/v1/videos", list_videos),
        Route("/v1/videos", create_video, methods=["POST"]),
        Route("/v1/videos/{video_id}", retrieve_video),
        Route("/v1/videos/{video_id}", delete_video, methods=["DELETE"]),
        Route("/v1/videos/{video_id}/content", video_content),
        Route("/v1/videos/{video_id}/remix", remix_video, methods=["POST"]),
    ]


async def health(request: Request) -> Response:
    """Answer 200 while Redis can be reached, and 503 otherwise."""
    await request.app.state.snapshots.get(None)
    return Json({"status": "ok"})


async def live(_request: Request) -> Response:
    """Answer 200 while the server runs."""
    return Json({"status": "ok"})


async def list_models(request: Request) -> Response:
    """List the models that render videos now."""
    data = [
        {"id": model_stem(name), "object": "model", "created": 0, "owned_by": "svdq"} for name in await _models(request)
    ]
    return Json({"object": "list", "data": data})


async def create_video(request: Request) -> Response:
    """Store a photo and enqueue its video; the same photo and parameters are the same video."""
    form = await request.app.state.reader.read(request)
    try:
        asked = read_request(form.fields, datetime.now().astimezone(), request.app.state.model)
        await _check_model(request, asked)
        if form.file is None and not asked.photo_url:
            message = "The photo is missing; send it as the file input_reference, or as a data URL."
            raise ApiError(400, message, param="input_reference", code="missing_parameter")
        if form.file is not None and asked.photo_url:
            message = "There are two photos; send one in each request."
            raise ApiError(400, message, param="input_reference", code="duplicate")
        photo = form.file if form.file is not None else BytesIO(decode_data_url(asked.photo_url))
        [[submission], views] = await create(request.app.state.backend, photo, form.file_name, asked.spec)
    finally:
        form.close()
    request.app.state.polls.forget(submission.id)
    return await _answer(request, submission, views)


async def list_videos(request: Request) -> Response:
    """List videos by the time of their creation."""
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after", "")
    if limit not in map(str, range(1, MAX_PAGE + 1)):
        message = f"limit {limit[:20]!r} is not allowed: it must be 1 to {MAX_PAGE}."
        raise ApiError(400, message, param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order {order[:20]!r} is not allowed: it must be asc or desc.", param="order")
    key = (int(limit), order, after)
    views, estimates, has_more = await request.app.state.pages.get(key)
    names, settings = await _models(request), request.app.state.backend.settings
    data = [video_object(view, estimates.get(view.id), names, settings) for view in views]
    ends = [data[index]["id"] if data else None for index in (0, -1)]
    return Json({"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": has_more})


async def retrieve_video(request: Request) -> Response:
    """Describe a video."""
    view, estimate = await _find(request)
    names, settings = await _models(request), request.app.state.backend.settings
    return Json(video_object(view, estimate, names, settings))


async def delete_video(request: Request) -> Response:
    """Cancel a video that is not finished; remove its files and its record."""
    view, _ = await _find(request)
    await remove(request.app.state, view.id)
    return Json({"id": view.id, "object": "video.deleted", "deleted": True})


async def video_content(request: Request) -> Response:
    """Return the video, or a picture of it."""
    variant = request.query_params.get("variant", "video")
    if variant not in ("video", "thumbnail"):
        message = f"variant {variant[:20]!r} is not allowed: it must be video or thumbnail."
        raise ApiError(400, message, param="variant")
    view, _ = await _find(request)
    content: Content = request.app.state.content
    if variant == "video":
        return await content.video(view, request.query_params.get("format"))
    if view.status != "finished":
        raise not_ready(view)
    return await content.poster(view)


async def remix_video(request: Request) -> Response:
    """Enqueue another video of the same photo, with a new seed and the parameters that are given."""
    view, _ = await _find(request)
    form = await request.app.state.reader.read(request)
    form.close()
    base = replace(options_of(view), seed=None)
    asked = read_request(form.fields, datetime.now().astimezone(), request.app.state.model, base)
    await _check_model(request, asked)
    if form.file is not None or asked.photo_url:
        raise ApiError(400, "A remix has the photo of its video; leave the photo out.", param="input_reference")
    [options] = asked.spec.options
    if options.seed is None:
        options = replace(options, seed=_new_seed(request, view.id))
    notes = (*asked.spec.notes, ("remixed_from", view.id))
    spec = replace(asked.spec, options=(options,), notes=notes)
    [[submission], views] = await make_again(request.app.state.backend, view, spec)
    return await _answer(request, submission, views)


def _new_seed(request: Request, video_id: str) -> int:
    """Draw a seed; a client that repeats a request with its Idempotency-Key gets the same one."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return secrets.randbits(SEED_BITS)
    return int.from_bytes(hashlib.sha256(f"{video_id} {key}".encode()).digest()[: SEED_BITS // 8])


async def _answer(request: Request, submission: Submission, views: list[JobView]) -> Response:
    request.app.state.pages.forget()
    if not views:
        raise no_such_video(submission.id)  # somebody has just deleted it
    names, settings = await _models(request), request.app.state.backend.settings
    return Json(video_object(views[0], None, names, settings, warning=submission.warning))


async def _find(request: Request) -> tuple[JobView, Any]:
    video_id = request.path_params["video_id"]
    found: Polled = await request.app.state.polls.get(video_id) if JOB_ID.fullmatch(video_id) else None
    if found is None:
        raise no_such_video(video_id)
    return found


async def _models(request: Request) -> list[str]:
    """Return the full names of the models that render jobs now; without workers, the configured one."""
    snapshot = await request.app.state.snapshots.get(None)
    running = dict.fromkeys(rank.model for group in snapshot.groups for rank in group.ranks)
    return list(running) or [request.app.state.backend.settings.model]


async def _check_model(request: Request, asked: VideoRequest) -> None:
    names = await _models(request)
    stems = [model_stem(name) for name in names]
    if asked.model and asked.model not in names and asked.model not in stems:
        message = f"No worker runs the model {asked.model[:80]!r}; running: {', '.join(stems)}. Leave model out for it."
        raise ApiError(400, message, param="model", code="model_not_found")


class PageReader:
    """Reads pages of videos, and remembers where they ended."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._ends: dict[str, Place] = {}

    async def __call__(self, key: tuple[int, str, str]) -> tuple[list[JobView], dict[str, Estimate], bool]:
        """Read the page of a limit, an order and the id that it comes after, with estimates and whether there is more.

        Raises:
            ApiError: there is no such id.
        """
        limit, order, after = key

        def work(connection: Any) -> tuple[list[JobView], dict[str, Estimate], bool, Place | None]:
            begin = self._ends.get(after) or (place_of(connection, after) if JOB_ID.fullmatch(after) else None)
            if after and begin is None:
                raise ApiError(400, f"There is no video {after[:80]!r}.", param="after", code="not_found")
            views, has_more = read_page(connection, limit, begin, newest_first=order == "desc")
            end = place_of(connection, views[-1].id) if views else None
            return views, estimate_pending(connection, views), has_more, end

        views, estimates, has_more, end = await self._backend.read(work)
        if end is not None:
            self._ends[end[1]] = end
            if len(self._ends) > MAX_ENDS:
                del self._ends[next(iter(self._ends))]
        return views, estimates, has_more
