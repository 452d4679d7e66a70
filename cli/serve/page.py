"""The views of the page."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import redis
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from svdq.cli.serve import review
from svdq.cli.serve.access import COOKIE_MAX_AGE_S
from svdq.cli.serve.api import live
from svdq.cli.serve.api_errors import ApiError, Json, no_such_video, without_folders
from svdq.cli.serve.backend import Backend, draft_of
from svdq.cli.serve.bodies import limited
from svdq.cli.serve.content import Content, keys_of, zip_of
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO
from svdq.cli.serve.form import families, fields, label_of, read_changes, read_spec, whole_number
from svdq.cli.serve.now import counts_of, events
from svdq.cli.serve.tokens import cookie_of
from svdq.cli.serve.videos import JOB_ID, files_of
from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.families import PARAMETERS
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.pipeline.models.lora_folder import LoraFolder
from svdq.pipeline.models.model_name import model_stem
from svdq.producer import job_control, keys
from svdq.producer.connection import clock_of
from svdq.producer.job import JOBS
from svdq.producer.pauses import free, pause, resume
from svdq.producer.queue import no_such_job, priority_of, queues, statuses
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.registries import newest_ids, read_several_owners
from svdq.producer.status.running import Running, read_running
from svdq.producer.status.selection import owners_of
from svdq.producer.submitting.foresight import estimate_of
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import running_model
from svdq.producer.submitting.parameters import SEED_BITS
from svdq.producer.submitting.sources import SUFFIXES, SYSTEM_FOLDERS
from svdq.producer.together import ask_one
from svdq.producer.verdicts import read_verdicts, record_verdict

FOLDER = Path(__file__).parent
#: The address of the static files changes with them, so that browsers keep them for good.
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((FOLDER / "static").iterdir())))
STATIC = f"/static/{_DIGEST.hexdigest()[:12]}"
templates = Jinja2Templates(FOLDER / "templates")
templates.env.globals["static"] = STATIC

_JobId = Annotated[str, StringConstraints(pattern=f"^{JOB_ID.pattern}$")]
#: Largest number of videos in one action or zip.
MAX_JOBS = 10_000
#: What browsers say of a link that no other site has opened; they say nothing to a server without TLS elsewhere.
_OWN_SITES = ("none", "same-origin")
REMOVED = "The video was removed."
MAX_LOGIN_BYTES = 8 << 10  # bytes of a login, which anybody on the network may send


class _Action(BaseModel, extra="forbid"):
    action: Literal[
        "pause",
        "free",
        "resume",
        "cancel",
        "cancel-waiting",
        "front",
        "place",
        "retry",
        "keep",
        "reject",
        "unmark",
        "upscale",
        "delete",
    ]
    ids: list[_JobId] = Field([], max_length=MAX_JOBS)
    #: The job before which the first one is placed.
    before: _JobId | None = None
    everybody: bool = False  # whether those that wait are everybody's, not only the visitor's


class _Videos(BaseModel, extra="forbid"):
    ids: list[_JobId] = Field([], max_length=MAX_JOBS)


class _Repetition(BaseModel, extra="forbid"):
    id: str
    #: New values of parameters, as text; a new seed if there are none.
    changes: dict[str, str] = {}


_Body = TypeVar("_Body", bound=BaseModel)


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [
        Route("/", index),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route("/page/events", events),
        Route("/page/alive", live),  # 401 to a page whose cookie is not valid any more
        Route("/page/estimate", estimate),
        Route("/page/photos", add, methods=["POST"]),
        Route("/page/picture/{video_id}", picture),
        Route("/page/photo/{video_id}", photo),
        Route("/page/preview/{video_id}", preview),
        Route("/page/content/{video_id}", content),
        Route("/page/results", results),
        Route("/page/results/{video_id}", result),
        Route("/page/waiting", waiting),
        Route("/page/others", others),
        Route("/page/left", left),
        Route("/page/progress", progress),
        Route("/page/verdicts", verdicts, methods=["POST"]),
        Route("/page/actions", act, methods=["POST"]),
        Route("/page/repeat", repeat, methods=["POST"]),
        Route("/page/zip", download, methods=["POST"]),
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


def mine_of(request: Request) -> tuple[str, str]:
    """Return the owners whose videos are the visitor's: videos without an owner are everybody's."""
    return request.state.owner or request.app.state.backend.settings.owner, ""


def _wanted_owners(request: Request) -> tuple[str, ...]:
    """Return the owners that a list is asked for; () for all."""
    return mine_of(request) if request.query_params.get("whose") == "mine" else ()


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


async def estimate(request: Request) -> Response:
    """Answer when videos would be done that are not queued yet."""
    given = dict(request.query_params)
    num_videos = whole_number(given.pop("num_videos", "1"), "The number of videos")
    state = request.app.state
    now = await state.backend.read(clock_of)
    wanted = await _read_spec(request, given, now)
    snapshot, num_jobs = await state.snapshots.get(), num_videos * wanted.num_links
    found = estimate_of(snapshot, [wanted.example()], num_jobs, wanted.at, now)
    is_local = state.backend.storage.folder is not None
    mean = await state.backend.in_thread(state.older.mean_bytes) if is_local else None
    return Json({"eta_s": found.eta_s, "reason": found.reason, "bytes": mean and mean * num_videos})


async def _read_spec(request: Request, given: dict[str, str], now: datetime, **others: bool) -> JobSpec:
    """Parse the form of the page, which omits defaults; times are after `now`."""
    read, family = request.app.state.backend.read, given.get("family")
    stem = model_stem(given.get("model", ""))
    expected = Expected(model=running_model(await read(read_running), family, stem)) if family else NOT_KNOWN
    return read_spec(given, now, expected, **others)


async def add(request: Request) -> Response:
    """Store a photo and queue its videos; a kill of anything after the answer loses none of them."""
    form = await request.app.state.reader.read(request)
    try:
        if PHOTO not in form.files:
            raise ApiError(400, "The photo is missing.", param=PHOTO, code="missing_parameter")
        given = {name: str(value) for name, value in form.fields}
        source, below = given.pop("source", "")[:1000], given.pop("below", "")
        name = given.pop("file_name", form.file_name)  # in the file's, browsers replace quotation marks
        last_photo = form.files.get(LAST_PHOTO)
        now = await request.app.state.backend.read(clock_of)
        wanted = await _read_spec(request, given, now, has_last_photo=last_photo is not None)
        wanted = replace(wanted, owner=request.state.owner)
        submissions, _ = await request.app.state.backend.create(
            form.files[PHOTO], name, wanted, source=source, below=below, last_photo=last_photo
        )
    finally:
        form.close()
    jobs = [
        {"id": each.id, "is_new": each.is_new, "status": each.status, "warning": each.warning} for each in submissions
    ]
    return Json({"jobs": jobs})


async def picture(request: Request) -> Response:
    """Return a small picture of a video: its first frame, or its photo before it is finished."""
    stored: Content = request.app.state.content
    return await stored.poster(await _find(request, request.path_params["video_id"]), request.state.owner)


async def photo(request: Request) -> Response:
    """Return the photo of a video, as the video shows it."""
    stored: Content = request.app.state.content
    return await stored.photo(await _find(request, request.path_params["video_id"]), request.state.owner)


async def preview(request: Request) -> Response:
    """Return how a video in flight looks so far, as an animated WebP; the address has the number of its steps."""
    key = f"{keys.PICTURE}{request.path_params['video_id']}"
    data = await request.app.state.backend.read(lambda connection: connection.hget(key, "webp"))
    if data is None:
        raise no_such_video(request.path_params["video_id"])
    return Response(data, media_type="image/webp", headers={"Cache-Control": "private, max-age=300"})


async def content(request: Request) -> Response:
    """Return a file of a finished video, also of one whose job Redis has forgotten."""
    stored: Content = request.app.state.content
    view = await _find(request, request.path_params["video_id"])
    return await stored.video(view, request.query_params.get("format"), request.headers)


async def _find(request: Request, video_id: str) -> JobView:
    found = await _views(request, [video_id])
    if not found:
        raise no_such_video(video_id)
    return found[0]


async def _views(request: Request, job_ids: list[str]) -> list[JobView]:
    """Read jobs, those that Redis has forgotten from the storage; missing ones are left out."""
    state = request.app.state
    job_ids = [job_id for job_id in job_ids if JOB_ID.fullmatch(job_id)]
    found: list[JobView] = await state.backend.read(lambda connection: view_many(connection, job_ids))
    missing = sorted(set(job_ids).difference(job.id for job in found))
    return found + (await state.backend.in_thread(lambda: state.older.views(missing)) if missing else [])


async def results(request: Request) -> Response:
    """List finished and failed videos, the newest first."""
    state, query = request.app.state, request.query_params
    show, before = query.get("show") or "open", query.get("before", "")
    search, owners = query.get("search", "")[:1000], _wanted_owners(request)
    page = partial(review.read_page, show=show, before=before, search=search, owners=owners, is_brief="brief" in query)
    return Json(await state.backend.read(lambda connection: page(connection, state.backend.storage, state.older)))


async def result(request: Request) -> Response:
    """Describe one video of the list."""
    backend, view = request.app.state.backend, await _find(request, request.path_params["video_id"])
    [mark] = await backend.read(lambda connection: read_verdicts(connection, [view.id]))
    return Json(await backend.in_thread(lambda: review.reviewed(view, mark, request.app.state.older)))


async def waiting(request: Request) -> Response:
    """List the ids of all videos that are made or wait."""
    find = partial(_ids_of, statuses=("started", *job_control.WAITING), owners=_wanted_owners(request))
    return Json({"ids": await request.app.state.backend.read(find)})


def _ids_of(connection: redis.Redis, statuses: Sequence[str], owners: Sequence[str]) -> list[str]:
    """Return the ids of jobs with some statuses, of some owners or, without any, of all."""
    job_ids = newest_ids(connection, statuses=statuses)
    if not owners:
        return job_ids
    return [job_id for job_id, owner in zip(job_ids, owners_of(connection, job_ids), strict=True) if owner in owners]


async def others(request: Request) -> Response:
    """Answer how many videos of other owners wait: a pause is for them, too."""
    mine = mine_of(request)

    def count(connection: redis.Redis) -> int:
        owners = owners_of(connection, newest_ids(connection, statuses=job_control.WAITING))
        return sum(owner not in mine for owner in owners if owner is not None)

    return Json({"waiting": await request.app.state.backend.read(count)})


async def left(request: Request) -> Response:
    """Answer how many videos there are of each status, for pages that are hidden."""
    return Json({"counts": counts_of(await request.app.state.snapshots.get())})


async def progress(request: Request) -> Response:
    """Answer how many finished videos there are, and how many of them have a verdict."""
    backend, older = request.app.state.backend, request.app.state.older
    find = partial(review.read_progress, older=older, owners=_wanted_owners(request))
    return Json(await backend.read(find))


async def verdicts(request: Request) -> Response:
    """Return the verdicts about videos that a page shows, by id, without those that are gone, and states of jobs."""
    backend, ids = request.app.state.backend, (await _read(request, _Videos)).ids
    marks = await backend.read(lambda connection: read_verdicts(connection, ids))
    states, gone = await _states(request, ids)
    given = {job_id: mark or "" for job_id, mark in zip(ids, marks, strict=True) if job_id not in gone}
    return Json({"verdicts": given, "states": states})


async def _states(request: Request, ids: Sequence[str]) -> tuple[dict[str, str | None], set[str]]:
    """Return the states of jobs, by id, and those videos of which there is neither a job nor a file."""
    backend = request.app.state.backend
    found = dict(zip(ids, await backend.read(lambda connection: statuses(connection, ids)), strict=True))
    gone = {job_id for job_id, status in found.items() if status is None}
    return found, gone - await backend.in_thread(request.app.state.older.ids) if gone else gone


async def act(request: Request) -> Response:
    """Do the action of a button."""
    backend = request.app.state.backend
    asked = await _read(request, _Action)
    if asked.action == "delete":
        problems = await _delete(request, asked.ids)
    elif asked.action == "upscale":
        problems = await backend.upscale(asked.ids, request.state.owner)
    else:
        _, gone = await _states(request, asked.ids) if asked.action in ("keep", "reject") else ({}, set())
        asked = asked.model_copy(update={"ids": [job_id for job_id in asked.ids if job_id not in gone]})
        problems = await backend.write(lambda connection: _named(connection, _act(connection, asked, mine_of(request))))
        problems |= dict.fromkeys(gone, REMOVED)
    await request.app.state.snapshots.forget()
    await request.app.state.page_states.forget()
    return Json({"problems": problems})


async def _delete(request: Request, job_ids: list[str]) -> dict[str, str]:
    """Remove videos with their files; return a sentence about each that stays, by id."""
    backend: Backend = request.app.state.backend
    problems: dict[str, InputError] = {}
    found = await backend.read(lambda connection: statuses(connection, job_ids))
    for job_id, status in zip(job_ids, found, strict=True):
        if status is not None:
            try:
                await backend.remove(job_id)
            except InputError as error:
                problems[job_id] = error
    older = request.app.state.older
    older.forget()
    if forgotten := {job_id for job_id, status in zip(job_ids, found, strict=True) if status is None}:
        problems |= await backend.write(partial(older.remove, job_ids=forgotten))
    return await backend.read(lambda connection: _named(connection, problems))


def _named(connection: redis.Redis, problems: dict[str, InputError]) -> dict[str, str]:
    """Return the sentences about jobs, by id, with their names instead of the ids, which the page does not show."""
    names = {job.id: f'"{job.name}"' for job in view_many(connection, problems)}
    sentences = {job_id: without_folders(str(error)) for job_id, error in problems.items()}
    return {
        job_id: REMOVED
        if text == str(no_such_job(job_id))
        else text.replace(f"Job {job_id!r}", names.get(job_id, "The video"))
        for job_id, text in sentences.items()
    }


def _act(connection: redis.Redis, asked: _Action, mine: Sequence[str]) -> dict[str, InputError]:
    """Do an action of a visitor, who is one of `mine`; return the jobs that it does not apply to, by id, and why."""
    problems: dict[str, InputError] = {}
    match asked.action:
        case "pause":
            pause(connection)
        case "free":
            free(connection)
        case "resume":
            resume(connection)
        case "cancel" | "retry":
            act_on_many = job_control.cancel_many if asked.action == "cancel" else job_control.retry_many
            outcomes = act_on_many(connection, asked.ids)
            problems = {job_id: outcome for job_id, outcome in outcomes if isinstance(outcome, InputError)}
        case "cancel-waiting":  # errors are of jobs that have just begun or ended
            waiting = _ids_of(connection, job_control.WAITING, () if asked.everybody else mine)
            list(job_control.cancel_many(connection, waiting))
        case "keep" | "reject":
            record_verdict(connection, asked.ids, asked.action)
        case "unmark":
            record_verdict(connection, asked.ids, None)
        case "place" if asked.ids and asked.before:
            try:
                job_control.place(connection, asked.ids[0], asked.before)
            except InputError as error:
                problems[asked.ids[0]] = error
        case "front":
            for job_id in asked.ids:
                try:  # to the front of the most urgent queue that has any
                    priorities = [priority_of(queue.name) for queue in queues(connection) if queue.count]
                    job_control.move(connection, job_id, front=True, priority=next(iter(priorities), None))
                except InputError as error:
                    problems[job_id] = error
    return problems


async def repeat(request: Request) -> Response:
    """Make a video again, with another seed or with changed parameters."""
    backend = request.app.state.backend
    asked = await _read(request, _Repetition)
    view = await _find(request, asked.id)
    draft = draft_of(view).overridden(read_changes(asked.changes))
    if draft.seed is None or not asked.changes:
        draft = replace(draft, seed=secrets.randbits(SEED_BITS))
    priority = priority_of(view.queue) or "default"
    wanted = JobSpec(drafts=(draft,), priority=priority, owner=request.state.owner)
    wanted.check(label_of)
    [[submission], _] = await backend.create_again(view, wanted)
    return Json({"id": submission.id, "is_new": submission.is_new, "status": submission.status})


async def download(request: Request) -> Response:
    """Stream the files of videos as one zip."""
    backend = request.app.state.backend
    async with limited(request).form(max_files=0, max_fields=1, max_part_size=MAX_JOBS * 64) as form:
        job_ids = list(dict.fromkeys(str(form.get("ids", "")).split(",")))
    if len(job_ids) > MAX_JOBS:
        raise ApiError(400, f"Choose {MAX_JOBS:,} videos at most.")
    jobs = await _views(request, job_ids)
    older = request.app.state.older

    def find() -> list[str]:
        files = [each for job in jobs for each in files_of(older.located(job)).items()]
        return [key for each in files for key in keys_of(backend.storage, *each)]

    keys = await backend.in_thread(find)
    if not keys:
        raise ApiError(404, "There are no files of these videos; they were removed.")
    headers = {"Content-Disposition": f'attachment; filename="videos-{datetime.now():%Y-%m-%d-%H%M}.zip"'}
    return StreamingResponse(zip_of(backend.storage, keys), media_type="application/zip", headers=headers)


async def _read(request: Request, model: type[_Body]) -> _Body:
    try:
        return model.model_validate_json(await limited(request).body())
    except ValidationError as error:
        reason = first_error(error)["msg"]
        raise ApiError(400, f"The request is not one that the page sends ({reason}); load the page again.") from error
