"""Files of videos: addressed by job and format, never by a path; with Range; zips and posters."""

import contextlib
import io
import logging
import re
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.backend import PHOTO_BYTES, Backend
from svdq.cli.serve.videos import STATUS, failure_of, files_of
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.parameters import Fit
from svdq.producer.files import sweep as sweep_files
from svdq.producer.results.finished_videos import OUTPUTS
from svdq.producer.results.poster import poster_of_photo, poster_of_video
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView
from svdq.producer.storage.local import Entry
from svdq.producer.storage.storage import STAGING_PREFIX, Storage
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES

logger = logging.getLogger(__name__)

MEDIA_TYPES = {"mp4": "video/mp4", "gif": "image/gif", "webp": "image/webp"}
#: A browser keeps a file and asks whether it has changed: a job may be rendered again.
CACHING = {"Cache-Control": "private, no-cache"}
#: Bytes of a file that are read at a time.
CHUNK = 1 << 18
#: A Range header with one part.
_RANGE = re.compile(r"bytes=(?P<first>\d{0,18})-(?P<last>\d{0,18})", re.ASCII)
#: Small pictures in memory at a time, of about 20 KB each.
MAX_PICTURES = 500


class _Pipe(io.BytesIO):
    """A file from which what was written is taken; it has no position, so `zipfile` counts the bytes itself."""

    def tell(self) -> int:
        """Refuse."""
        raise io.UnsupportedOperation

    def take(self) -> bytes:
        """Return what was written since the last time."""
        taken = self.getvalue()
        self.seek(0)
        self.truncate()
        return taken


def zip_of(storage: Storage, keys: Iterable[str]) -> Iterator[bytes]:
    """Yield a zip of files in parts; holds one file in memory at a time. Videos are not compressed again.

    A file that was removed meanwhile is left out.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for key in keys:
            entry = storage.entry(key)
            if entry is None:
                continue
            modified = entry.modified_at.astimezone().timetuple()[:6]
            info = zipfile.ZipInfo(key.removeprefix(f"{OUTPUTS}/"), max(modified, (1980, 1, 1, 0, 0, 0)))  # its epoch
            info.external_attr = 0o644 << 16
            archive.writestr(info, storage.read(key))
            yield pipe.take()
    yield pipe.take()


def keys_of(storage: Storage, kind: str, key: str) -> list[str]:
    """Return the storage keys of the files of one format of a video, of which frames have many."""
    if kind == "png":
        return sorted(f"{key}/{name}" for name in storage.names(key) if name.startswith("frame_"))
    return [key] if storage.exists(key) else []


def sweep(storage: Storage) -> None:
    """Remove what killed servers have left in the storage and in the system's folder for temporary files."""
    sweep_files(Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"), STAGING_PREFIX)
    try:
        storage.sweep()
    except UnavailableError as error:  # requests are answered with 503 until it is back
        logger.warning("%s", error)


class Content:
    """The files of one server's videos."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._picture_of_video = lru_cache(MAX_PICTURES)(self._make_picture_of_video)
        self._picture_of_photo = lru_cache(MAX_PICTURES)(self._make_picture_of_photo)

    async def video(self, view: JobView, kind: str | None) -> Response:
        """Return a file of a finished video; without a format its mp4, else the first; frames as a zip.

        Raises:
            ApiError: the video has no such file, or it was removed.
        """
        files = files_of(view)
        if not files:
            raise not_ready(view, self._backend.settings)
        kind = kind or ("mp4" if "mp4" in files else next(iter(files)))
        if kind not in files:
            raise ApiError(400, f"The video has no {kind[:20]!r}; it has {', '.join(files)}.", param="format")
        name, storage = PurePosixPath(files[kind]).name, self._backend.storage
        if kind == "png":
            keys = await self._backend.in_thread(lambda: keys_of(storage, kind, files[kind]))
            if not keys:
                raise _removed(view)
            headers = {**CACHING, "Content-Disposition": _inline(f"{name}.zip")}
            return StreamingResponse(zip_of(storage, keys), media_type="application/zip", headers=headers)

        def open_file() -> tuple[Entry, BinaryIO]:
            entry = storage.entry(files[kind])
            if entry is None:
                raise _removed(view)
            return entry, storage.open(entry.key)

        entry, file = await self._backend.in_thread(open_file)
        return _File(self._backend, file, entry, MEDIA_TYPES.get(kind, "application/octet-stream"), name)

    async def poster(self, view: JobView) -> Response:
        """Return a small picture: the first frame of a finished video, the photo of any other job.

        Raises:
            ApiError: there is neither.
        """
        for kind, key in files_of(view).items():
            if kind != "png":
                # A video without a picture shows its photo.
                with contextlib.suppress(ApiError, InputError, UnavailableError):
                    return await self._picture(partial(self._picture_of_video, kind, key, view.ended_at))
                break
        parameters = view.parameters
        size = parameters.get("width") or 1024, parameters.get("height") or 576
        image, fit = str(parameters.get("image", "")), parameters.get("fit", "crop")
        try:
            return await self._picture(partial(self._picture_of_photo, image, size, fit))
        except (InputError, UnavailableError) as error:
            raise ApiError(404, f"The video {view.id!r} has no picture.") from error

    async def _picture(self, make: Callable[[], bytes]) -> Response:
        return Response(await self._backend.make_picture(make), headers=CACHING, media_type="image/jpeg")

    def _make_picture_of_video(self, kind: str, key: str, _ended_at: datetime | None) -> bytes:
        storage = self._backend.storage
        if storage.entry(key) is None:
            raise InputError(f"There is no video {key!r}.")
        if storage.folder is not None:
            return poster_of_video(storage.folder / key, kind)
        with tempfile.NamedTemporaryFile() as file:
            storage.copy_out(key, Path(file.name))
            return poster_of_video(Path(file.name), kind)

    def _make_picture_of_photo(self, key: str, size: tuple[int, int], fit: Fit) -> bytes:
        entry = self._backend.storage.entry(key)
        if entry is None or entry.size > MAX_FOREIGN_BYTES:
            raise InputError(f"There is no photo {key!r}, or it is too large.")
        with PHOTO_BYTES.take(entry.size):
            return poster_of_photo(self._backend.storage.read(key), size, fit, self._backend.settings.max_pixels)


def _inline(name: str) -> str:
    quoted = quote(name)
    return f"inline; filename*=utf-8''{quoted}" if quoted != name else f'inline; filename="{name}"'


class _File(Response):
    """An open file, or a part of it, unless the client has it; closed after it."""

    def __init__(self, backend: Backend, file: BinaryIO, entry: Entry, media_type: str, name: str) -> None:
        self._backend = backend
        self._file = file
        self._size = entry.size
        headers = {
            **CACHING,
            "Accept-Ranges": "bytes",
            "Content-Disposition": _inline(name),
            "Content-Length": str(entry.size),
            "ETag": f'"{entry.size:x}-{int(entry.modified_at.timestamp() * 1e6):x}"',
            "Last-Modified": format_datetime(entry.modified_at.astimezone(UTC), usegmt=True),
        }
        super().__init__(headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, a part of it, or why there is no such part."""
        try:
            await self._answer(scope["method"], Headers(scope=scope))(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._backend.in_thread(self._file.close)

    def _answer(self, method: str, asked: Headers) -> Response:
        if StaticFiles().is_not_modified(self.headers, asked):
            return NotModifiedResponse(self.headers)
        headers, status = dict(self.headers), HTTPStatus.OK
        start, end = 0, self._size
        is_same = asked.get("if-range", headers["etag"]) in (headers["etag"], headers["last-modified"])
        part = _part(asked.get("range", ""), self._size) if is_same and method in ("GET", "HEAD") else None
        if part is not None:
            start, end = part
            if start >= self._size:
                message = "The Range header names no part of the file; ask for bytes=FIRST-LAST within its size."
                size = {"Content-Range": f"bytes */{self._size}"}
                return ApiError(416, message, code="invalid_range", headers=size).response()
            status = HTTPStatus.PARTIAL_CONTENT
            headers |= {"content-range": f"bytes {start}-{end - 1}/{self._size}", "content-length": str(end - start)}
        if method == "HEAD":
            return Response(status_code=status, headers=headers)
        return StreamingResponse(self._read(start, end), status, headers)

    async def _read(self, start: int, end: int) -> AsyncIterator[bytes]:
        await self._backend.in_thread(lambda: self._file.seek(start))
        while start < end and (
            chunk := await self._backend.in_thread(partial(self._file.read, min(CHUNK, end - start)))
        ):
            start += len(chunk)
            yield chunk


def _part(header: str, size: int) -> tuple[int, int] | None:
    """Return the part of a file that a Range header names; None for the whole: a server may ignore the header."""
    found = _RANGE.fullmatch(header)
    if found is None or found["first"] == found["last"] == "":
        return None
    if not found["first"]:
        return max(size - int(found["last"]), 0), size
    first = int(found["first"])
    if not found["last"]:
        return first, size
    last = int(found["last"])
    return None if last < first else (first, min(last + 1, size))


def _removed(view: JobView) -> ApiError:
    return ApiError(404, f"The files of the video {view.id!r} were removed.")


def not_ready(view: JobView, settings: Settings) -> ApiError:
    """Create the error for a video without files: it is not finished, or why it has failed."""
    status = STATUS.get(view.status, "failed")
    if status == "failed":
        failure = failure_of(view, settings)
        return ApiError(404, failure["message"], code=failure["code"])
    return ApiError(404, f"The video {view.id!r} is {status}; get its file when it is completed.", code="not_ready")
