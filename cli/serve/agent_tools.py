"""The tools of agents: each is a pydantic model of its arguments, and calls what the API and the commands call."""

import asyncio
import inspect
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from svdq.cli.serve.access import mine_of
from svdq.cli.serve.api import create_from, describe, describe_made, find_video, models_of, read_fields, remix_from
from svdq.cli.serve.api_errors import ApiError, RedisAwayError, no_token
from svdq.cli.serve.backend import Backend
from svdq.cli.serve.bodies import Form, with_photos
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO, SOUND, flatten
from svdq.cli.serve.now import counts_of
from svdq.cli.serve.videos import Status, Video, files_of
from svdq.pipeline.models.model_name import model_stem
from svdq.producer import job_control
from svdq.producer.connection import clock_of
from svdq.producer.keys import PRIORITIES
from svdq.producer.pauses import stop_all
from svdq.producer.results.fetch import fetch_all, results_of
from svdq.producer.settings import given_path
from svdq.producer.status.job_view import JobView
from svdq.producer.status.selection import read_page
from svdq.producer.submitting.foresight import estimate_of
from svdq.producer.submitting.photos import read_photo
from svdq.producer.text import duration

POLL_S = 0.5  # seconds between two looks at a video that an agent waits for
MAX_WAIT_S = 600.0
_RENAMED = {"sound": SOUND[0], "parameters": "extra_params"}  # the names that `/v1/videos` has for arguments
_PHOTO = "a data URL (data:image/jpeg;base64,…); over stdio also the path of a file"
_ID = "id of the video"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who calls a tool, and how the tool reports."""

    request: Request
    is_local: bool  # the user of this machine, over stdio: may name files
    report: Callable[[float, float | None, str], Awaitable[None]]  # progress, its total, and a text

    @property
    def backend(self) -> Backend:
        """The access to Redis and the storage."""
        backend: Backend = self.request.app.state.backend
        return backend

    def check_token(self) -> None:
        """Raise ApiError if the token of the caller was removed meanwhile."""
        if self.request.app.state.options.owner_of(self.request) is None:
            raise no_token()


def _shorten(schema: dict[str, Any]) -> None:
    """Drop what says nothing to an agent, which reads all schemas before each conversation."""
    for name in ("title", "description"):
        schema.pop(name, None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
        if field.get("default", ...) is None:  # left out, rather than null
            field |= field.pop("anyOf")[0]
            del field["default"]


class Schema(BaseModel):
    """What a tool takes or returns."""

    model_config = ConfigDict(json_schema_extra=_shorten)


class FileResult(Schema):
    """A file of a video."""

    name: str
    format: str
    url: str = Field(description="where it is; http URLs take the token of this server, as /mcp does")


class VideoResult(Schema):
    """A video."""

    id: str
    status: Status
    name: str
    owner: str
    progress: int = Field(description="percent")
    model: str
    size: str
    seconds: str
    seed: int | None = None
    eta_s: float | None = Field(None, description="seconds until it is completed")
    eta_reason: str | None = Field(None, description="why that is not known, or not measured")
    error: str | None = None
    notice: str | None = None
    existing: bool | None = Field(None, description="whether it existed before this request")
    files: list[FileResult] = []


class QueueResult(Schema):
    """The videos of all, and the workers."""

    queued: int
    in_progress: int
    models: list[str] = Field(description="what workers run; without workers, the configured model")
    paused: bool
    eta_s: float | None = Field(None, description="seconds until all is done")
    eta_reason: str | None = None


class StatusResult(Schema):
    """Videos and the queue."""

    videos: list[VideoResult]
    queue: QueueResult


class CancelResult(Schema):
    """What came of a cancellation."""

    id: str
    outcome: str = Field(description="canceled, or stopping: at its next step")


class EstimateResult(Schema):
    """When videos would be done."""

    num_videos: int
    eta_s: float | None = Field(None, description="seconds from now")
    eta_reason: str | None = Field(None, description="why that is not known, or not measured")


class FetchResult(Schema):
    """The files that were copied, or were there already."""

    paths: list[str]


#: Hints to the agent's host, by MCP's names, of tools that add something, harmlessly if they are called again.
ADDS: Mapping[str, bool] = {
    "read_only_hint": False,
    "destructive_hint": False,
    "idempotent_hint": True,
    "open_world_hint": False,
}


class Arguments(Schema):
    """The arguments of a tool, whose description is the docstring."""

    model_config = ConfigDict(extra="forbid")
    #: What it returns, and hints as in `ADDS`.
    result: ClassVar[type[BaseModel]]
    hints: ClassVar[Mapping[str, bool]] = {"read_only_hint": True, "open_world_hint": False}

    async def run(self, caller: Caller) -> BaseModel:
        """Do it; raises ApiError and SvdqError."""
        raise NotImplementedError

    @classmethod
    def description(cls) -> str:
        """Return what the tool does."""
        return inspect.cleandoc(cls.__doc__ or "")


class _Parameters(Arguments):
    """The parameters of a video."""

    prompt: str | None = Field(None, description="what happens in the video, for models that take a prompt")
    negative_prompt: str | None = None
    seconds: float | None = Field(None, description="length of the video")
    size: str | None = Field(None, description="such as 576x320, or auto for the shape of the photo")
    seed: int | None = Field(None, description="another seed makes another video of the same photo")
    sound: bool | None = Field(None, description="whether it has sound, for models that make it")
    model: str | None = Field(None, description="a model that workers run; any if left out")
    name: str | None = Field(None, description="name of the files")
    priority: str | None = Field(None, json_schema_extra={"enum": [*PRIORITIES]})
    parameters: dict[str, Any] | None = Field(
        None, description='all others, as the fields of /v1/videos: {"num_inference_steps": 20, "formats": ["gif"]}'
    )

    def fields(self) -> list[tuple[str, Any]]:
        """Return the fields of a request to `/v1/videos`."""
        given = self.model_dump(include={*_Parameters.model_fields}, exclude_none=True)
        return [(_RENAMED.get(name, name), value) for name, value in given.items()]


class Submit(_Parameters):
    """Queue a video of a photo, and return at once; `wait` waits for it.

    The same photo with the same parameters is the same video, so a repeated call is harmless. Give either a photo or
    the id of a video, which makes another one of its photo, with its parameters and a new seed.
    """

    result = VideoResult
    hints = ADDS

    photo: str | None = Field(None, description=f"the first frame: {_PHOTO}")
    last_photo: str | None = Field(None, description="the last frame, in the same ways, for models that take one")
    video_id: str | None = Field(None, description="instead of a photo: the video to make another one of")

    async def run(self, caller: Caller) -> BaseModel:
        if (self.photo is None) == (self.video_id is None):
            raise ApiError(400, "Give either photo or video_id.", param="photo", code="missing_parameter")
        form = Form(fields=self.fields())
        try:
            for name, text in ((PHOTO, self.photo), (LAST_PHOTO, self.last_photo)):
                if text is not None:
                    await _add_photo(caller, form, name, text)
            form = await asyncio.to_thread(with_photos, form)
            if self.video_id is None:
                made = await create_from(caller.request, form)
            else:
                view = await find_video(caller.request, self.video_id)
                made = await remix_from(caller.request, view, form)
        finally:
            form.close()
        return await _result(caller, made[1], await describe_made(caller.request, *made))


class ShowStatus(Arguments):
    """Show one video with links to its files, or the newest videos, and what waits for the workers."""

    result = StatusResult

    video_id: str | None = Field(None, description=f"{_ID}; the newest if left out")
    whose: Literal["mine", "everybody"] | None = Field(
        None, description="of the newest; mine if your token has a name, else everybody"
    )
    limit: int = Field(10, ge=1, le=50, description="number of the newest")

    async def run(self, caller: Caller) -> BaseModel:
        request = caller.request
        if self.video_id is not None:
            views: Sequence[JobView] = [await find_video(request, self.video_id)]
        else:
            whose = self.whose or ("mine" if request.state.owner else "everybody")
            owners = mine_of(request) if whose == "mine" else ()
            views, _, _ = await caller.backend.read(lambda connection: read_page(connection, self.limit, owners=owners))
        videos = await describe(request, views)
        snapshot = await request.app.state.snapshots.get()
        counts = counts_of(snapshot)
        queue = QueueResult(
            queued=counts["queued"] + counts["scheduled"] + counts["deferred"],
            in_progress=counts["started"],
            models=list(map(model_stem, await models_of(request))),
            paused=stop_all(snapshot.pauses),
            eta_s=_rounded(snapshot.estimate.eta_s),
            eta_reason=snapshot.estimate.reason or None,
        )
        results = [await _result(caller, *each) for each in zip(views, videos, strict=True)]
        return StatusResult(videos=results, queue=queue)


class Wait(Arguments):
    """Wait until a video has ended, with reports of its progress, and return it with links to its files.

    After timeout_s it is returned as it is then; call again to wait on.
    """

    result = VideoResult

    video_id: str = Field(description=_ID)
    timeout_s: float = Field(45, ge=0, le=MAX_WAIT_S, description="seconds to wait at most")

    async def run(self, caller: Caller) -> BaseModel:
        ends_at, reported = time.monotonic() + self.timeout_s, -1
        while True:
            caller.check_token()
            try:
                view = await find_video(caller.request, self.video_id)
                [video] = await describe(caller.request, [view])
                if view.ended or time.monotonic() >= ends_at:
                    return await _result(caller, view, video)
                if view.step > reported:
                    reported = view.step
                    await caller.report(view.step, view.steps or None, _progress(view, video))
            except RedisAwayError:  # an outage only takes time
                if time.monotonic() >= ends_at:
                    raise
            await asyncio.sleep(min(POLL_S, max(0.0, ends_at - time.monotonic())))


class Cancel(Arguments):
    """Cancel a video that has not ended; one in flight stops at its next step."""

    result = CancelResult
    hints = {**ADDS, "destructive_hint": True, "idempotent_hint": False}

    video_id: str = Field(description=_ID)

    async def run(self, caller: Caller) -> BaseModel:
        view = await find_video(caller.request, self.video_id)
        outcome = await caller.backend.write(lambda connection: job_control.cancel(connection, view.id))
        await caller.request.app.state.snapshots.forget()
        return CancelResult(id=view.id, outcome=outcome)


class Estimate(_Parameters):
    """Say when videos with these parameters would be done, after all that waits. Queues nothing."""

    result = EstimateResult

    num_videos: int = Field(1, ge=1, le=1_000_000)

    async def run(self, caller: Caller) -> BaseModel:
        fields, *urls = flatten(self.fields())
        if any(urls):
            raise ApiError(400, "An estimate has no photos; leave them out.", param="parameters")
        spec = await read_fields(caller.request, fields)
        now = await caller.backend.read(clock_of)
        snapshot = await caller.request.app.state.snapshots.get()
        found = estimate_of(snapshot, [spec.example()], self.num_videos * spec.num_links, spec.at, now)
        return EstimateResult(num_videos=self.num_videos, eta_s=_rounded(found.eta_s), eta_reason=found.reason or None)


class Fetch(Arguments):
    """Copy the files of a finished video into a folder of this machine. Replaces nothing that is there."""

    result = FetchResult
    hints = ADDS

    video_id: str = Field(description=_ID)
    folder: str = Field(description="where to; it is made if it is missing")

    async def run(self, caller: Caller) -> BaseModel:
        backend = caller.backend

        def fetch() -> list[str]:
            results = results_of(backend.settings, backend.storage, [self.video_id])
            return [
                str(path.absolute()) for each in fetch_all(backend.storage, results, self.folder) for path in each.paths
            ]

        return FetchResult(paths=await backend.in_thread(fetch))


#: Tools by name: of all clients, and of the user of this machine.
TOOLS: Mapping[str, type[Arguments]] = {
    "submit": Submit,
    "status": ShowStatus,
    "wait": Wait,
    "cancel": Cancel,
    "estimate": Estimate,
}
LOCAL_TOOLS: Mapping[str, type[Arguments]] = {**TOOLS, "fetch": Fetch}


async def _add_photo(caller: Caller, form: Form, name: str, text: str) -> None:
    """Add a photo to a form; raises ApiError and InputError."""
    if text.startswith("data:"):
        form.fields.append((name, text))
    elif caller.is_local:
        path = given_path(text)
        data = await caller.backend.in_thread(lambda: read_photo(path, caller.backend.settings.max_pixels))
        form.files[name] = io.BytesIO(data)
        if name == PHOTO:
            form.file_name = path.name
    else:
        message = "A photo must be a data URL (data:image/jpeg;base64,…): this server reads no files for its clients."
        raise ApiError(400, message, param=name)


async def _result(caller: Caller, view: JobView, video: Video) -> VideoResult:
    own, error = video["svdq"], video["error"]
    return VideoResult(
        id=video["id"],
        status=video["status"],
        name=own["name"],
        owner=own["owner"],
        progress=video["progress"],
        model=video["model"],
        size=video["size"],
        seconds=video["seconds"],
        seed=own["seed"],
        eta_s=own["eta_s"],
        eta_reason=own["eta_reason"],
        error=error["message"] if error else None,
        notice=own["notice"],
        existing=own.get("existing"),
        files=await _files(caller, view, video),
    )


async def _files(caller: Caller, view: JobView, video: Video) -> list[FileResult]:
    if not caller.is_local:
        at = f"{caller.request.url.scheme}://{caller.request.headers['host']}"
        return [
            FileResult(name=each["name"], format=each["format"], url=at + each["url"])
            for each in video["svdq"]["files"]
        ]
    storage, older = caller.backend.storage, caller.request.app.state.older
    keys = files_of(await caller.backend.in_thread(lambda: older.located_here(view)))
    places = {kind: storage.location(key) for kind, key in keys.items()}
    return [
        FileResult(
            name=place.rpartition("/")[2],
            format=kind,
            url=place if storage.folder is None else Path(place).as_uri(),
        )
        for kind, place in places.items()
    ]


def _progress(view: JobView, video: Video) -> str:
    eta_s = video["svdq"]["eta_s"]
    done = f"step {view.step} of {view.steps}" if view.steps else video["status"]
    return done if eta_s is None else f"{done}, done in about {duration(eta_s)}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
