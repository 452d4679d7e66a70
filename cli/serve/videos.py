"""The video object of the API: OpenAI's fields, and svdq's own in `svdq`."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # of Python 3.12; pydantic describes no older ones

from svdq.cli.serve.api_errors import without_folders
from svdq.cli.serve.fields import PROMPTS
from svdq.pipeline.models.families import DEFAULT_FAMILY
from svdq.pipeline.models.model_name import model_stem
from svdq.producer import keys
from svdq.producer.job import JOBS, NAMING
from svdq.producer.queue import priority_of
from svdq.producer.results.finished_videos import OUTPUTS
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.job_view import JobView
from svdq.producer.text import rfc3339

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")  # ids of jobs that RQ allows
Status = Literal["queued", "in_progress", "completed", "failed"]
#: The API's word for each status of RQ; any other is a failure, since clients wait for these four only.
STATUS: Mapping[str, Status] = {
    "queued": "queued",
    "scheduled": "queued",
    "deferred": "queued",
    "started": "in_progress",
    "finished": "completed",
}


class VideoError(TypedDict):
    """Why a video has failed or was canceled."""

    code: str
    message: str


class VideoFile(TypedDict):
    """One file of a finished video."""

    name: str
    format: str
    url: str


class OwnFields(TypedDict):
    """What svdq adds to OpenAI's video object."""

    status: str  # RQ's word
    name: str
    owner: str  # "" for nobody
    photo: str
    seed: int | None
    step: int
    steps: int
    eta_s: float | None
    eta_reason: str | None
    waits_for: str | None
    at: str | None
    priority: str
    duration_s: float | None
    ignored: list[str]
    notice: str | None
    parameters: dict[str, Any]
    files: list[VideoFile]
    existing: NotRequired[bool]  # of a request that makes a video


class Video(TypedDict):
    """A video."""

    id: str
    object: Literal["video"]
    status: Status
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    model: str
    prompt: str | None
    seconds: str
    size: str
    remixed_from_video_id: str | None
    error: VideoError | None
    file_name: str | None
    inference_time_s: float | None
    svdq: OwnFields


def video_object(view: JobView, estimate: Estimate, models: Mapping[str, str]) -> Video:
    """Describe a job; `models` run, with their families: one of its family makes a job that has not begun."""
    status: Status = STATUS.get(view.status, "failed") if view.is_readable else "failed"
    parameters = view.parameters
    completed_at = _epoch(view.ended_at) if status in ("completed", "failed") else None
    ttl_s = keys.RESULT_TTL_S if status == "completed" else keys.FAILURE_TTL_S
    family = parameters.get("family", DEFAULT_FAMILY)
    model = view.model or next((name for name, own in models.items() if own in ("", family)), family)
    usual_frames, usual_fps = JOBS.get(family, JOBS[DEFAULT_FAMILY]).usual
    frames, fps = parameters.get("frames") or usual_frames, parameters.get("fps") or usual_fps
    width, height = parameters.get("width"), parameters.get("height")
    own = _own(view, estimate)
    progress = 100 if status == "completed" else int(100 * view.step / view.steps) if view.steps else 0
    return {
        "id": view.id,
        "object": "video",
        "status": status,
        "progress": min(progress, 100),
        "created_at": _epoch(view.created_at),
        "completed_at": completed_at,
        "expires_at": None if completed_at is None else completed_at + ttl_s,
        "model": model_stem(model),
        "prompt": parameters.get("prompt", view.notes.get("prompt")),
        "seconds": f"{frames / fps:.3f}".rstrip("0").rstrip("."),
        "size": f"{width}x{height}" if width and height else "auto",
        "remixed_from_video_id": view.notes.get("remixed_from"),
        "error": failure_of(view) if status == "failed" else None,
        "file_name": own["files"][0]["name"] if own["files"] else None,
        "inference_time_s": None if view.duration_s is None else round(view.duration_s, 3),
        "svdq": own,
    }


def failure_of(view: JobView) -> VideoError:
    """Return the code and the reason of a video that has failed or was canceled."""
    if view.status in ("canceled", "stopped"):
        return {"code": "cancelled", "message": "The video was canceled."}
    return {"code": "failed", "message": without_folders(view.error or "The video failed.")}


def _own(view: JobView, estimate: Estimate) -> OwnFields:
    ignored = [name for name in PROMPTS if view.notes.get(name) and name not in view.parameters]
    notices = [view.notice] if view.notice else []
    if ignored:
        notices.append(f"This model takes no {' and no '.join(ignored)}: ignored.")
    return {
        "status": view.status,
        "name": view.name,
        "owner": view.owner,
        "photo": view.photo.replace("\\", "/").rpartition("/")[2],
        "seed": view.parameters.get("seed"),
        "step": view.step,
        "steps": view.steps,
        "eta_s": None if estimate.eta_s is None else round(estimate.eta_s, 1),
        "eta_reason": estimate.reason or None,
        "waits_for": view.waits_for or None,
        "at": rfc3339(view.scheduled_at) if view.scheduled_at else None,
        "priority": priority_of(view.queue),
        "duration_s": None if view.duration_s is None else round(view.duration_s, 3),
        "ignored": ignored,
        "notice": " ".join(notices) or None,
        "parameters": {
            name: value for name, value in view.parameters.items() if name not in (*NAMING, "seed", "prompt")
        },
        "files": [
            {"name": key.rpartition("/")[2], "format": kind, "url": f"/v1/videos/{view.id}/content?format={kind}"}
            for kind, key in files_of(view).items()
        ],
    }


def files_of(view: JobView) -> dict[str, str]:
    """Return the storage keys of the files of a finished job by format; frames are a folder of the format png."""
    names = [location.rstrip("/").rpartition("/")[2] for location in view.outputs] if view.status == "finished" else []
    folder = "/".join(filter(None, (OUTPUTS, str(view.parameters.get("folder", "")))))
    # Anyone with access to Redis may have written the names: of no other files than the job's own.
    parts = [(name, *name.rpartition(f"-{view.id}")[1:]) for name in names]
    return {end.removeprefix(".") or "png": f"{folder}/{name}" for name, is_own, end in parts if is_own}


def _epoch(moment: datetime | None) -> int:
    return int(moment.timestamp()) if moment else 0
