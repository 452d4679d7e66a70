"""The views of `/v1/videos`, `/v1/models` and `/health`."""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import redis
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from svdq.cli.serve.api_errors import ApiError, Json, RedisAwayError, no_such_video, no_token
from svdq.cli.serve.backend import draft_of
from svdq.cli.serve.bodies import Form
from svdq.cli.serve.content import Content, not_ready
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO, PROMPTS, model_in, read_request
from svdq.cli.serve.now import estimate_views
from svdq.cli.serve.openapi import MAX_PAGE, make_document
from svdq.cli.serve.videos import JOB_ID, STATUS, Video, failure_of, video_object
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.connection import clock_of
from svdq.producer.pauses import stop_all
from svdq.producer.queue import is_queue
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.selection import place_of, read_page
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.job_spec import ANY_PHOTO, JobSpec
from svdq.producer.submitting.model_choice import expect
from svdq.producer.submitting.parameters import SEED_BITS

MAX_ENDS = 1000  # ends of pages that are remembered: their jobs may be deleted before the next page is asked for
#: Headers of the answer of `/v1/videos/sync`.
SYNC_HEADERS = ("X-Video-Id", "X-Model", "X-Inference-Time-S", "X-Stage-Durations", "X-Peak-Memory-MB")
#: Paths of OpenAI's API that are no ids of videos.
NOT_OFFERED = ("/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/characters")
POLL_S = 0.5  # seconds between two looks at a video that somebody waits for
POLL_MS = (2000, 5000)  # milliseconds after which clients are told to ask again: the shortest and the longest


def routes() -> list[BaseRoute]:
    """Return the routes of the API."""
    return [
        Route("/health", health),
        Route("/health/live", live),
        Route("/openapi.json", openapi),
        Route("/queue", queue),
        Route("/v1/models", list_models),
        Route("/v1/models/{model_id:path}", retrieve_model),
        Route("/v1/videos", list_videos),
        Route("/v1/videos", create_video, methods=["POST"]),
        Route("/v1/videos/generations", create_video, methods=["POST"]),
        Route("/v1/videos/sync", create_and_wait, methods=["POST"]),
        *(Route(path, not_offered, methods=["POST"]) for path in NOT_OFFERED),
        Route("/v1/videos/{video_id}", retrieve_video),
        Route("/v1/videos/{video_id}", delete_video, methods=["DELETE"]),
        Route("/v1/videos/{video_id}/content", video_content),
        Route("/v1/videos/{video_id}/remix", remix_video, methods=["POST"]),
    ]


async def not_offered(request: Request) -> Response:
    """Answer 404 for what other servers do with videos."""
    raise ApiError(404, f"There are no {request.url.path.rpartition('/')[2]} of videos here; make a remix.")


async def openapi(_request: Request) -> Response:
    """Describe these paths as an OpenAPI document."""
    return Json(await asyncio.to_thread(make_document, routes(), NOT_OFFERED))


async def health(request: Request) -> Response:
    """Answer 200 while Redis can be reached, and 503 otherwise."""
    await request.app.state.snapshots.get()
    return Json({"status": "ok"})


async def live(_request: Request) -> Response:
    """Answer 200 while the server runs."""
    return Json({"status": "ok"})


async def queue(request: Request) -> Response:
    """Return how many jobs wait for a worker, or for one of a model, 0 while intake is paused; KEDA starts workers."""
    snapshot = await request.app.state.snapshots.get()
    model = request.query_params.get("model")
    wanted = (name for name in snapshot.queues if model is None or name.partition(":")[2] in ("", model))
    waiting = sum(snapshot.queues[name]["queued"] for name in wanted)
    return Json({"waiting": 0 if stop_all(snapshot.pauses) else waiting})


async def list_models(request: Request) -> Response:
    """List the models that workers run or load."""
    return Json({"object": "list", "data": [_model(name) for name in await models_of(request)]})


async def retrieve_model(request: Request) -> Response:
    """Describe a model that workers run or load, by its full name or the last part of it."""
    names = await models_of(request)
    return Json(_model(_find_model(request.path_params["model_id"], names, HTTPStatus.NOT_FOUND)))


def _model(name: str) -> dict[str, Any]:
    return {"id": model_stem(name), "object": "model", "created": 0, "owned_by": "svdq"}


async def create_video(request: Request) -> Response:
    """Store a photo and enqueue its video; the same photo and parameters are the same video."""
    return await _answer(request, *await _create(request))


async def create_and_wait(request: Request) -> Response:
    """Create a video and return its file when it is finished; the video goes on if the client goes away."""
    begun_at = time.monotonic()
    submission, _, _ = await _create(request)
    view = await _wait(request, submission.id)
    if STATUS.get(view.status) != "completed":
        failure = failure_of(view)
        raise ApiError(500, failure["message"], code=failure["code"])
    response: Response = await request.app.state.content.video(view, None, Headers())
    # The last two are what vLLM-Omni sends where nothing was measured.
    values = (view.id, quote(model_stem(view.model)), f"{time.monotonic() - begun_at:.3f}", "{}", "0.000")
    response.headers.update(dict(zip(SYNC_HEADERS, values, strict=True)))
    return response


async def _wait(request: Request, video_id: str) -> JobView:
    """Return a video when it has ended; an outage of Redis only takes time."""
    options = request.app.state.options
    while not await request.is_disconnected():
        if options.owner_of(request) is None:
            raise no_token()
        with contextlib.suppress(RedisAwayError):
            view = await _view(request, video_id)
            if view.ended:
                return view
        await asyncio.sleep(POLL_S)
    raise ClientDisconnect


async def _create(request: Request) -> tuple[Submission, JobView, JobSpec]:
    return await create_from(request, await request.app.state.reader.read(request))


async def create_from(request: Request, form: Form) -> tuple[Submission, JobView, JobSpec]:
    """Store the photo of a form, which is closed, and enqueue its video, or find it; raises as `Backend.create`."""
    backend = request.app.state.backend
    try:
        last_photo = form.files.get(LAST_PHOTO)
        base = Draft(last_image=ANY_PHOTO) if last_photo else None
        spec = _for_key(request, await read_fields(request, form.fields, base))
        if PHOTO not in form.files:
            message = (
                "The photo is missing: a video is made of a photo, not of a prompt alone. Send it as the file "
                f"{PHOTO}, or as a data URL."
            )
            raise ApiError(400, message, param=PHOTO, code="missing_parameter")
        make = partial(backend.create, form.files[PHOTO], form.file_name, spec, last_photo=last_photo)
        submission, view = await _submit(request, make)
    finally:
        form.close()
    return submission, view, spec


async def read_fields(request: Request, fields: Sequence[tuple[str, Any]], base: Draft | None = None) -> JobSpec:
    """Read the fields of a request, for the model that will probably make the video; raises ApiError."""
    backend = request.app.state.backend
    wanted, names = model_in(fields), await models_of(request)
    # Of a model that runs alone, the job is the same as without its name.
    stem = model_stem(wanted) if wanted and len(names) > 1 else None
    expected, now = await backend.read(
        lambda connection: (expect(backend.settings, connection, stem), clock_of(connection))
    )
    spec = replace(read_request(fields, now, expected, base), owner=request.state.owner)
    if not wanted:
        return spec
    _find_model(wanted, names, HTTPStatus.BAD_REQUEST)
    return replace(spec, drafts=tuple(replace(each, model=stem) for each in spec.drafts))


async def list_videos(request: Request) -> Response:
    """List videos by the time of their creation."""
    query = request.query_params
    if unknown := next((name for name in query if name not in ("limit", "order", "after")), ""):
        message = f"There is no filter {unknown[:80]!a}; the parameters of a list are limit, order and after."
        raise ApiError(400, message, param=unknown[:80], code="unknown_parameter")
    limit, order, after = query.get("limit", "20"), query.get("order", "desc").lower(), query.get("after", "")
    if limit not in map(str, range(MAX_PAGE + 1)):
        message = f"limit {limit[:20]!r} is not allowed: it must be 0 to {MAX_PAGE}."
        raise ApiError(400, message, param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order {order[:20]!r} is not allowed: it must be asc or desc.", param="order")
    ends = request.app.state.page_ends

    def read(connection: redis.Redis) -> tuple[list[JobView], bool]:
        begin = ends.get(after) or (place_of(connection, after) if JOB_ID.fullmatch(after) else None)
        if after and begin is None:
            raise ApiError(400, f"There is no video {after[:80]!r}.", param="after", code="not_found")
        views, has_more, end = read_page(connection, int(limit), begin, newest_first=order == "desc")
        if end is not None:
            ends[views[-1].id] = end
            if len(ends) > MAX_ENDS:
                del ends[next(iter(ends))]
        return views, has_more

    # At once: Redis may be far away.
    (views, has_more), _ = await asyncio.gather(request.app.state.backend.read(read), request.app.state.snapshots.get())
    first, last = (views[0].id, views[-1].id) if views else (None, None)
    data = await describe(request, views)
    return Json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})


async def retrieve_video(request: Request) -> Response:
    """Describe a video, and say when to ask again."""
    view = await _find(request)
    [video] = await describe(request, [view])
    return _polled(view, video)


def _polled(view: JobView, video: Video) -> Response:
    """Answer with a video and, unless it has ended, when to ask for it again."""
    if view.ended:
        return Json(video)
    eta_s, (shortest, longest) = video["svdq"]["eta_s"], POLL_MS
    poll_ms = longest if eta_s is None else round(min(max(1000 * eta_s, shortest), longest))
    return Json(video, headers={"Openai-Poll-After-Ms": str(poll_ms)})


async def describe(request: Request, views: Sequence[JobView]) -> list[Video]:
    """Return the objects of videos, with estimates."""
    state = request.app.state
    snapshot: Snapshot = await state.snapshots.get()
    estimates = await state.backend.read(lambda connection: estimate_views(connection, views, snapshot))
    models = await models_of(request)
    return [video_object(view, estimates.get(view.id, Estimate()), models) for view in views]


async def delete_video(request: Request) -> Response:
    """Cancel a video that is not finished; remove its files and its record."""
    view = await _find(request)
    await request.app.state.backend.remove(view.id)
    return Json({"id": view.id, "object": "video.deleted", "deleted": True})


async def video_content(request: Request) -> Response:
    """Return the video, or a picture of it."""
    variant = request.query_params.get("variant", "video")
    if variant not in ("video", "0", "thumbnail"):  # 0 is SGLang's name of the first video of a request
        message = f"variant {variant[:20]!r} is not allowed: it must be video or thumbnail."
        raise ApiError(400, message, param="variant")
    view = await _find(request)
    content: Content = request.app.state.content
    if variant != "thumbnail":
        return await content.video(view, request.query_params.get("format"), request.headers)
    if view.status != "finished":
        raise not_ready(view)
    return await content.poster(view, request.state.owner)


async def remix_video(request: Request) -> Response:
    """Enqueue another video of the same photo, with a new seed and the parameters that are given."""
    view = await _find(request)
    return await _answer(request, *await remix_from(request, view, await request.app.state.reader.read(request)))


async def remix_from(request: Request, view: JobView, form: Form) -> tuple[Submission, JobView, JobSpec]:
    """Enqueue another video of the photos of one, with the fields of a form; raises as `create_from`."""
    form.close()
    base = replace(draft_of(view), seed=None)
    spec = _for_key(request, await read_fields(request, form.fields, base), view.id)
    if form.files:
        raise ApiError(400, "A remix has the photos of its video; leave photos out.", param=next(iter(form.files)))
    [draft] = spec.drafts
    if draft.seed is None:
        draft = replace(draft, seed=secrets.randbits(SEED_BITS))
    spec = replace(spec, drafts=(draft,), notes=(*spec.notes, ("remixed_from", view.id)))
    submission, made = await _submit(request, lambda: request.app.state.backend.create_again(view, spec))
    return submission, made, spec


def _for_key(request: Request, spec: JobSpec, video_id: str = "") -> JobSpec:
    """Ask for a video of the request's own if it has an Idempotency-Key: the same one for the same key."""
    key = request.headers.get("idempotency-key", "")
    if not key:
        return spec
    [draft] = spec.drafts
    if draft.seed is None:
        seed = int.from_bytes(hashlib.sha256(f"{video_id} {key}".encode()).digest()[: SEED_BITS // 8])
        draft = replace(draft, seed=seed)
    return replace(spec, drafts=(draft,), request_key=key)


async def _submit(
    request: Request, make: Callable[[], Coroutine[Any, Any, tuple[list[Submission], list[JobView]]]]
) -> tuple[Submission, JobView]:
    """Make a video, or return the one that exists; a job that is being deleted is made anew when it has stopped."""
    removals = request.app.state.backend.removals
    while True:
        [[submission], views] = await make()
        removal = removals.get(submission.id)
        if views and (removal is None or (submission.is_new and not submission.was)):
            return submission, views[0]
        if removal is not None:
            await asyncio.wait({removal})


async def _answer(request: Request, submission: Submission, view: JobView, spec: JobSpec) -> Response:
    return _polled(view, await describe_made(request, submission, view, spec))


async def describe_made(request: Request, submission: Submission, view: JobView, spec: JobSpec) -> Video:
    """Return the object of a video that a request has made or found, with what it has to say about the request."""
    notices = [spec.notice]
    if submission.warning:
        notices.append(f"{submission.warning[0].upper()}{submission.warning[1:]}.")
    if not submission.is_new:
        # The record has the prompts of the first request, and the answer has the prompts of this one.
        texts = {name: text for name, text in spec.notes if name in PROMPTS}
        if any(view.notes.get(name, "") != text for name, text in texts.items()):
            notices.append("The video existed already, so this prompt was not recorded.")
        others = {name: text for name, text in view.notes.items() if name not in PROMPTS}
        view = replace(view, notes=others | texts)
    [video] = await describe(request, [view])
    own = video["svdq"]
    own["existing"] = not submission.is_new
    own["notice"] = " ".join(filter(None, [own["notice"], *notices])) or None
    return video


async def _find(request: Request) -> JobView:
    return await find_video(request, request.path_params["video_id"])


async def find_video(request: Request, video_id: str) -> JobView:
    """Return a video; raises ApiError if there is none, or it is being deleted."""
    if not JOB_ID.fullmatch(video_id) or video_id in request.app.state.backend.removals:
        raise no_such_video(video_id)
    return await _view(request, video_id)


async def _view(request: Request, video_id: str) -> JobView:
    views: list[JobView] = await request.app.state.backend.read(lambda connection: view_many(connection, [video_id]))
    # Other programs may have jobs in the same Redis. A record that cannot be read has no queue.
    if not views or (views[0].queue and not is_queue(views[0].queue)):
        raise no_such_video(video_id)
    return views[0]


async def models_of(request: Request) -> dict[str, str]:
    """Return the models that workers run or load by name, with their families, "" for any; else the configured one."""
    running = await request.app.state.models.get()
    return {name: family or "" for name, family in running.items()} or {request.app.state.backend.settings.model: ""}


def _find_model(asked: str, names: Iterable[str], status: int) -> str:
    """Return the model with the same last part of its name: a client may know it by another folder or a hub id."""
    for name in names:
        if model_stem(asked) == model_stem(name):
            return name
    stems = ", ".join(map(model_stem, names))
    message = f"There is no model {asked[:80]!r}; choose one of {stems}, or leave model out."
    raise ApiError(status, message, param="model", code="model_not_found")
