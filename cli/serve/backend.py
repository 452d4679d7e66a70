"""The server's access to Redis and the storage, in a bounded number of threads."""

import asyncio
import io
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, Generic, TypeVar, cast

import anyio
import anyio.to_thread
import redis

from svdq.cli.serve.api_errors import ApiError, RedisAwayError, no_such_video, without_folders
from svdq.cli.serve.decoders import Decoders
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.connection import connect
from svdq.producer.decoder import Decoder
from svdq.producer.job_control import queue_now
from svdq.producer.name_templates import literal
from svdq.producer.queue import fetch_many
from svdq.producer.results.finished_videos import find_results
from svdq.producer.results.remove import remove_job
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.finishing import submit_finishing
from svdq.producer.submitting.foresight import TooManyWaitingError
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photos import Photo
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit_all
from svdq.producer.threads import Budget
from svdq.producer.verdicts import read_verdicts

logger = logging.getLogger(__name__)

T = TypeVar("T")

PHOTO_BYTES = Budget(1 << 26)  # bytes of photos in memory at a time; a larger photo waits until it is alone
#: Threads that read Redis, that store photos and change jobs, and that read the storage; others wait.
READING_THREADS = 8
WRITING_THREADS = 4
STORAGE_THREADS = 8
READ_TIMEOUT_S = 10.0  # seconds that a read may take, the start of the embedded server included
#: Seconds for which Redis counts as away after it has failed, so that hundreds of requests do not wait for it in turn.
AWAY_S = 1.0
#: Seconds for which a `Shared` value is given to everybody who asks: of a cheap one, and at most.
FRESH_S, MAX_FRESH_S = 1.0, 5.0
MAX_SHARE = 0.02  # of a core for reading one
#: Seconds that a request waits for a job in flight to stop, between two looks, and until nobody waits any more.
STOP_S = 1.5
POLL_S = 0.25
#: Seconds without a request after which the next one connects anew: routers forget idle connections, and say nothing.
IDLE_S = 30.0
GIVE_UP_S = 600.0
UPSCALE = "2"  # the factor of the button
MAX_NAME = 255  # characters of a file's name that are kept


class Backend:
    """Runs blocking work in threads, with one pool of connections."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.storage = Storage(settings.storage)
        self._home = Storage(str(settings.home))
        self.decoders = Decoders()
        #: Jobs in flight that are removed when they have stopped, by id.
        self.removals: dict[str, asyncio.Task[None]] = {}
        self._connection: redis.Redis | None = None
        self._away_until = self._used_at = 0.0
        self._lock = threading.Lock()
        self._reading = anyio.CapacityLimiter(READING_THREADS)
        self._writing = anyio.CapacityLimiter(WRITING_THREADS)
        self._storage = anyio.CapacityLimiter(STORAGE_THREADS)

    async def read(self, work: Callable[[redis.Redis], T]) -> T:
        """Run short work with Redis in a thread; raises ApiError if Redis is away."""
        try:
            with anyio.fail_after(READ_TIMEOUT_S):
                return await anyio.to_thread.run_sync(
                    self._with_redis, work, limiter=self._reading, abandon_on_cancel=True
                )
        except TimeoutError as error:
            raise RedisAwayError() from error

    async def write(self, work: Callable[[redis.Redis], T]) -> T:
        """Run work with Redis in a thread; a client that disconnects does not interrupt it. Raises as `read`."""
        return await anyio.to_thread.run_sync(self._with_redis, work, limiter=self._writing)

    async def in_thread(self, work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
        """Run work with the storage, without Redis, in a thread."""
        return await anyio.to_thread.run_sync(work, limiter=limiter or self._storage)

    async def create(
        self,
        photo: BinaryIO,
        file_name: str,
        spec: JobSpec,
        *,
        source: str = "",
        below: str = "",
        last_photo: BinaryIO | None = None,
    ) -> tuple[list[Submission], list[JobView]]:
        """Store a photo and enqueue its jobs; when this returns, both survive a crash of everything.

        `file_name`, `source`, the path from the folder that was dropped, and `below`, the photo's folder in it, are the
        client's and no paths here. `last_photo` is the photo of the last frame. Without a folder or a name, videos go
        where the settings say. Returns the submissions, and the jobs of those that were not removed at
        once. Raises ApiError if a photo or a parameter is not allowed and nothing was stored, or if Redis is away, and
        UnavailableError if the storage cannot be written.
        """
        spec = replace(spec, owner=spec.owner or self.settings.owner)
        if not spec.folder and spec.name is None:
            spec = spec.with_output(self.settings.output)
        spec = spec.below(below) if below else spec
        files = [photo] if last_photo is None else [photo, last_photo]
        # The last part of the name, whichever system it comes from; never a path.
        name = file_name.replace("\\", "/").rpartition("/")[2].replace("\0", "").strip()[-MAX_NAME:]
        paths = [Path(name if name not in ("", ".", "..") else "photo"), Path(LAST_PHOTO)]
        num_bytes = sum(file.seek(0, io.SEEK_END) for file in files)

        def check(decoder: Decoder) -> list[Photo]:
            checked = []
            for file, path, field in zip(files, paths, ("image", "last_image"), strict=False):
                try:
                    checked.append(decoder.check(file, path, self.settings.max_pixels))
                except InputError as error:
                    raise InputError(str(error), field=field) from error
            return checked

        def work(connection: redis.Redis) -> tuple[list[Submission], list[JobView]]:
            with PHOTO_BYTES.take(num_bytes):
                first, *last = (replace(photo, data=_content(file)) for photo, file in zip(photos, files, strict=True))
                photo = replace(first, last=last[0] if last else None)
                request = PhotoRequest(path=photo.path, spec=spec, photo=photo, source=source)
                submissions = list(submit_all(self.settings, [request], connection=connection, storage=self.storage))
            if spec.at is None:  # a scheduled job that is asked for now does not wait for its time
                for number, submission in enumerate(submissions):
                    if submission.status == "scheduled":
                        queue_now(connection, submission.id)
                        submissions[number] = replace(submission, status="queued")
            return submissions, view_many(connection, [each.id for each in submissions])

        try:
            photos = await self.decoders.run(spec.owner, num_bytes, check)
            return await self.write(work)
        except TooManyWaitingError as error:
            raise ApiError(429, str(error), code="too_many_waiting") from error
        except InputError as error:
            param = {"last_image": LAST_PHOTO, "image": PHOTO}.get(error.field, error.field)
            raise ApiError(400, without_folders(str(error)), param=param or None) from error

    async def create_again(self, view: JobView, spec: JobSpec) -> tuple[list[Submission], list[JobView]]:
        """Make another video of the photos of a video; returns and raises as `create`."""
        keys = [view.parameters[name] for name in ("image", "last_image") if view.parameters.get(name)]
        entries = await self.in_thread(lambda: [self.storage.entry(key) for key in keys])
        if None in entries:
            raise ApiError(404, f"The photo of {view.name!r} was removed; add it again.")
        photo = PurePosixPath(view.photo.replace("\\", "/"))
        # A job is named by the stem of its photo, unless it was given a name.
        file_name = photo.name if photo.stem == view.name else f"{view.name}.photo"
        spec = replace(spec, folder=spec.folder or literal(view.parameters.get("folder", "")))

        def copied(key: str) -> BinaryIO:
            file = cast(BinaryIO, SpooledTemporaryFile(max_size=1 << 20))  # noqa: SIM115 - closed below
            file.write(self.storage.read_input(key))
            return file

        files = await self.in_thread(lambda: [copied(key) for key in keys])
        try:
            return await self.create(files[0], file_name, spec, source=view.source, last_photo=[*files, None][1])
        finally:
            for file in files:
                file.close()

    async def upscale(self, job_ids: Sequence[str], owner: str) -> dict[str, str]:
        """Queue kept videos to be upscaled by `UPSCALE`; return a sentence about each that is not, by id."""
        spec = JobSpec(drafts=(Draft(upscale=UPSCALE),), owner=owner or self.settings.owner)

        def work(connection: redis.Redis) -> dict[str, str]:
            problems: dict[str, str] = {}
            found = {result.job_id: result for result in find_results(self.storage, job_ids=frozenset(job_ids))}
            for job_id, mark in zip(job_ids, read_verdicts(connection, job_ids), strict=True):
                if mark != "keep" or job_id not in found:
                    problems[job_id] = "Its files were removed." if mark == "keep" else "Only kept videos are upscaled."
                    continue
                request = PhotoRequest(result=found[job_id], spec=spec)
                try:
                    list(submit_finishing(self.settings, [request], connection=connection, storage=self.storage))
                except InputError as error:
                    problems[job_id] = without_folders(str(error))
            return problems

        return await self.write(work)

    async def remove(self, job_id: str) -> None:
        """Remove a job, if it is in flight when it has stopped.

        Raises InputError if its video is needed, ApiError and UnavailableError.
        """

        def work(connection: redis.Redis) -> bool:
            [found] = fetch_many(connection, [job_id])
            return found is None or remove_job(connection, self.storage, self._home, job_id)

        async def remove_later() -> None:
            ends_at = time.monotonic() + GIVE_UP_S
            is_removed = False
            while not is_removed and time.monotonic() < ends_at:
                await asyncio.sleep(POLL_S)
                try:
                    is_removed = await self.write(work)
                except InputError:
                    return  # somebody has queued it again, or marked it
                except (ApiError, UnavailableError):
                    continue  # Redis or the storage is away

        if not await self.write(work):
            task = self.removals[job_id] = asyncio.create_task(remove_later())
            task.add_done_callback(lambda _: self.removals.pop(job_id, None))
            await asyncio.wait({task}, timeout=STOP_S)

    def _with_redis(self, work: Callable[[redis.Redis], T]) -> T:
        connection = self._connect()
        try:
            return work(connection)
        except redis.RedisError as error:
            # The next request connects anew. Other threads may still use the old connections, so they are not closed.
            if isinstance(error, redis.ConnectionError | redis.TimeoutError) and self._connection is connection:
                self._connection = None
            logger.warning("Redis cannot be used: %s", error)
            raise RedisAwayError() from error

    def _connect(self) -> redis.Redis:
        """Return the connection; if it was lost, connect again, which starts the embedded server."""
        with self._lock:
            now, before = time.monotonic(), self._used_at
            self._used_at = now
            if self._connection is None or now - before > IDLE_S:
                self._connection = None
                if now < self._away_until:
                    raise RedisAwayError()
                try:
                    self._connection = connect(self.settings)
                except UnavailableError as error:
                    self._away_until = time.monotonic() + AWAY_S
                    logger.warning("%s", error)
                    raise RedisAwayError() from error
            return self._connection


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def draft_of(view: JobView) -> Draft:
    """Return the parameters of a video; raises ApiError or InputError if no video can be made with them."""
    if "image" not in view.parameters:
        raise no_such_video(view.id)
    return Draft().with_defaults_from(view.parameters)


class Shared(Generic[T]):
    """A value that is read once a second at most, and with 2% of a core, however many ask for it."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._value: T
        self._fresh_until = 0.0

    async def get(self) -> T:
        """Return the value, at most a second old unless it is costly; raises what the read raises."""
        async with self._lock:
            if time.monotonic() >= self._fresh_until:
                begun_s = time.process_time()
                self._value = await self._read()
                fresh_s = (time.process_time() - begun_s) / MAX_SHARE
                self._fresh_until = time.monotonic() + min(max(FRESH_S, fresh_s), MAX_FRESH_S)
            return self._value

    async def forget(self) -> None:
        """Read the value anew at the next request, because this one has changed it."""
        async with self._lock:
            self._fresh_until = 0.0
