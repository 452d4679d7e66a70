"""The page's lists of videos, their pictures and files."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial

import redis
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from svdq.cli.serve import review
from svdq.cli.serve.access import mine_of, wanted_owners
from svdq.cli.serve.api_errors import ApiError, Json, no_such_video
from svdq.cli.serve.bodies import limited
from svdq.cli.serve.content import Content, keys_of, zip_of
from svdq.cli.serve.now import counts_of
from svdq.cli.serve.videos import JOB_ID, files_of
from svdq.producer import job_control, keys
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.selection import owners_of
from svdq.producer.verdicts import read_verdicts

#: Largest number of videos in one action or zip.
MAX_JOBS = 10_000


async def picture(request: Request) -> Response:
    """Return a small picture of a video: its first frame, or its photo before it is finished."""
    stored: Content = request.app.state.content
    return await stored.poster(await find_video(request, request.path_params["video_id"]), request.state.owner)


async def photo(request: Request) -> Response:
    """Return the photo of a video, as the video shows it."""
    stored: Content = request.app.state.content
    return await stored.photo(await find_video(request, request.path_params["video_id"]), request.state.owner)


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
    view = await find_video(request, request.path_params["video_id"])
    return await stored.video(view, request.query_params.get("format"), request.headers)


async def find_video(request: Request, video_id: str) -> JobView:
    """Read a job as `_views` does; raises ApiError if nobody knows it."""
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
    search, owners = query.get("search", "")[:1000], wanted_owners(request)
    page = partial(review.read_page, show=show, before=before, search=search, owners=owners, is_brief="brief" in query)
    return Json(await state.backend.read(lambda connection: page(connection, state.backend.storage, state.older)))


async def result(request: Request) -> Response:
    """Describe one video of the list."""
    backend, view = request.app.state.backend, await find_video(request, request.path_params["video_id"])
    [mark] = await backend.read(lambda connection: read_verdicts(connection, [view.id]))
    return Json(await backend.in_thread(lambda: review.reviewed(view, mark, request.app.state.older)))


async def waiting(request: Request) -> Response:
    """List the ids of all videos that are made or wait."""
    find = partial(ids_of, statuses=("started", *job_control.WAITING), owners=wanted_owners(request))
    return Json({"ids": await request.app.state.backend.read(find)})


def ids_of(connection: redis.Redis, statuses: Sequence[str], owners: Sequence[str]) -> list[str]:
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
    find = partial(review.read_progress, older=older, owners=wanted_owners(request))
    return Json(await backend.read(find))


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
