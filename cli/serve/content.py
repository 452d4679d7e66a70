"""Files of videos: addressed by job and format, never by a path; with Range; zips and posters."""

import contextlib
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import IO, cast
from urllib.parse import quote

import anyio
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.backend import Backend
from svdq.cli.serve.review import StoredVideos
from svdq.cli.serve.videos import STATUS, failure_of, files_of
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.video_parameters import Fit
from svdq.producer.decoder import Decoder
from svdq.producer.results.finished_videos import OUTPUTS
from svdq.producer.results.poster import poster_of_video
from svdq.producer.status.job_view import JobView
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES

MEDIA_TYPES = {"mp4": "video/mp4", "gif": "image/gif", "webp": "image/webp", "wav": "audio/wav"}
CACHING = {"Cache-Control": "private, no-cache"}  # kept, but asked for: a job may be rendered again
MAX_PICTURES = 500  # small pictures in memory at a time, of about 20 KB each
PICTURE_THREADS = 2  # threads that make those of videos
PART_BYTES = 1 << 20  # bytes of a zip in memory


class _Buffer(bytearray):
    """A file for `zipfile` without a position, so that `zipfile` counts the bytes itself."""

    def write(self, data: bytes) -> int:
        self.extend(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""

    def take(self) -> bytes:
        taken = bytes(self)
        self.clear()
        return taken


def zip_of(storage: Storage, keys: Iterable[str]) -> Iterator[bytes]:
    """Yield a zip of files in parts, uncompressed, without those that are gone."""
    buffer = _Buffer()
    with zipfile.ZipFile(cast(IO[bytes], buffer), "w", zipfile.ZIP_STORED) as archive:
        for key in keys:
            entry = storage.entry(key)
            if entry is None:
                continue
            modified = entry.modified_at.astimezone().timetuple()[:6]
            info = zipfile.ZipInfo(key.removeprefix(f"{OUTPUTS}/"), max(modified, (1980, 1, 1, 0, 0, 0)))  # its epoch
            info.external_attr = 0o644 << 16
            info.file_size = entry.size  # one above 2 GiB has another header
            with storage.open(key) as source, archive.open(info, "w") as target:
                while part := source.read(PART_BYTES):
                    target.write(part)
                    yield buffer.take()
    yield buffer.take()


def keys_of(storage: Storage, kind: str, key: str) -> list[str]:
    """Return the storage keys of the files of one format of a video, of which frames have many."""
    if kind == "png":
        return sorted(f"{key}/{name}" for name in storage.names(key) if name.startswith("frame_"))
    return [key] if storage.exists(key) else []


class Content:
    """The files of one server's videos."""

    def __init__(self, backend: Backend, videos: StoredVideos) -> None:
        self._backend = backend
        self._videos = videos
        self._decoders = anyio.CapacityLimiter(PICTURE_THREADS)
        self._picture_of_video = lru_cache(MAX_PICTURES)(self._make_picture_of_video)
        self._pictures_of_photos: dict[tuple[str, tuple[int, int], Fit], bytes] = {}

    async def video(self, view: JobView, kind: str | None, asked: Headers) -> Response:
        """Return a file of a finished video: by format, else its mp4 or first; frames as a zip. Raises ApiError."""
        files, storage = files_of(await self._located(view)), self._backend.storage
        if not files:
            raise not_ready(view)
        kind = kind or ("mp4" if "mp4" in files else next(iter(files)))
        if kind not in files:
            raise ApiError(400, f"The video has no {kind[:20]!r}; it has {', '.join(files)}.", param="format")
        key, name = files[kind], PurePosixPath(files[kind]).name
        if kind == "png":
            if not (keys := await self._backend.in_thread(lambda: keys_of(storage, kind, key))):
                raise _removed(view)
            headers = {**CACHING, "Content-Disposition": f"inline; filename*=utf-8''{quote(name)}.zip"}
            return StreamingResponse(zip_of(storage, keys), media_type="application/zip", headers=headers)
        entry = await self._backend.in_thread(lambda: storage.entry(key))
        if entry is None:
            raise _removed(view)
        headers = {
            **CACHING,
            "ETag": f'"{entry.size:x}-{int(entry.modified_at.timestamp() * 1e6):x}"',
            "Last-Modified": format_datetime(entry.modified_at.astimezone(UTC), usegmt=True),
        }
        if StaticFiles().is_not_modified(Headers(headers), asked):
            return NotModifiedResponse(Headers(headers))
        file = await self._backend.in_thread(lambda: _local_file(storage, key))
        return FileResponse(
            f"/dev/fd/{file.fileno()}",  # and no path, which may have become a link since
            headers=headers,
            media_type=MEDIA_TYPES.get(kind, "application/octet-stream"),
            background=BackgroundTask(file.close),
            filename=name,
            content_disposition_type="inline",
        )

    async def poster(self, view: JobView, owner: str) -> Response:
        """Return the first frame of a finished video, small, or the photo of any other job; else raises ApiError.

        `owner` is the name of the token that asks.
        """
        for kind, key in files_of(await self._located(view)).items():
            if kind != "png":
                # A video without a picture shows its photo.
                with contextlib.suppress(ApiError, InputError, UnavailableError):
                    make = partial(self._picture_of_video, kind, key, view.ended_at)
                    return _picture(await self._backend.in_thread(make, self._decoders))
                break
        return await self.photo(view, owner)

    async def photo(self, view: JobView, owner: str) -> Response:
        """Return the photo of a video, as the video shows it; raises as `poster`."""
        parameters = view.parameters
        size = parameters.get("width") or 1024, parameters.get("height") or 576
        image, fit = str(parameters.get("image", "")), parameters.get("fit", "crop")
        try:
            return _picture(await self._picture_of_photo(image, size, fit, owner))
        except (InputError, UnavailableError) as error:
            raise ApiError(404, f"The video {view.id!r} has no picture.") from error

    async def _located(self, view: JobView) -> JobView:
        return await self._backend.in_thread(lambda: self._videos.located(view))

    def _make_picture_of_video(self, kind: str, key: str, _ended_at: datetime | None) -> bytes:
        storage = self._backend.storage
        if storage.entry(key) is None:
            raise InputError(f"There is no video {key!r}.")
        with _local_file(storage, key) as file:
            return poster_of_video(file, kind)

    async def _picture_of_photo(self, key: str, size: tuple[int, int], fit: Fit, owner: str) -> bytes:
        if (found := self._pictures_of_photos.get((key, size, fit))) is not None:
            return found
        backend = self._backend
        entry = await backend.in_thread(lambda: backend.storage.entry(key))
        if entry is None or entry.size > MAX_FOREIGN_BYTES:
            raise InputError(f"There is no photo {key!r}, or it is too large.")

        def make(decoder: Decoder) -> bytes:
            return decoder.poster_of_photo(backend.storage.read(key), size, fit, backend.settings.max_pixels)

        found = self._pictures_of_photos[key, size, fit] = await backend.decoders.run(owner, entry.size, make)
        if len(self._pictures_of_photos) > MAX_PICTURES:
            del self._pictures_of_photos[next(iter(self._pictures_of_photos))]
        return found


def _picture(data: bytes) -> Response:
    return Response(data, headers=CACHING, media_type="image/jpeg")


def _local_file(storage: Storage, key: str) -> IO[bytes]:
    """Open a file, or a temporary copy, deleted on close, if the storage is remote."""
    if storage.folder is not None:
        return storage.open(key)
    copy = tempfile.NamedTemporaryFile()  # noqa: SIM115 - who uses it closes it
    storage.copy_out(key, Path(copy.name))
    return copy


def _removed(view: JobView) -> ApiError:
    return ApiError(404, f"The files of the video {view.id!r} were removed.")


def not_ready(view: JobView) -> ApiError:
    """Create the error for a video without files: it is not finished, or why it has failed."""
    status = STATUS.get(view.status, "failed")
    if status == "failed":
        failure = failure_of(view)
        return ApiError(404, failure["message"], code=failure["code"])
    return ApiError(404, f"The video {view.id!r} is {status}; get its file when it is completed.", code="not_ready")
