"""Photos that the form of the page adds, and when their videos would be done."""

from dataclasses import replace
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from svdq.cli.serve.api_errors import ApiError, Json
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO
from svdq.cli.serve.form import read_spec, whole_number
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.connection import clock_of
from svdq.producer.status.running import read_running
from svdq.producer.submitting.foresight import estimate_of
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import running_model


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
