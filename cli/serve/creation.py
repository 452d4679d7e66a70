"""Creates videos, for the page and the API alike, by the same function as `svdq submit`."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import redis

from svdq.cli.serve.backend import PHOTO_BYTES, Backend
from svdq.cli.serve.errors import ApiError, no_such_video, without_paths
from svdq.pipeline.errors import InputError
from svdq.producer.control import queue_now
from svdq.producer.status.status import JobView, view_many
from svdq.producer.submitting.family import ExpectedModel
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.options import SubmitOptions
from svdq.producer.submitting.submit import Request, Submission, expected_model, submit_all

#: Characters of a file's name that are kept.
MAX_NAME = 255


async def find_model(backend: Backend) -> ExpectedModel | None:
    """Return the model that new videos are for; raises ApiError if Redis is away."""
    return await backend.read(lambda connection: expected_model(backend.settings, connection))


async def create(
    backend: Backend, photo: BinaryIO, file_name: str, spec: JobSpec, *, source: str = ""
) -> tuple[list[Submission], list[JobView]]:
    """Store a photo and enqueue its jobs; when this returns, both survive a crash of everything.

    `file_name` and `source`, the path from the folder that was dropped, are the client's and no paths here. Returns the
    submissions, and the jobs of those that were not removed at once.

    Raises:
        ApiError: the photo or a parameter is not allowed, and nothing was stored; or Redis is away.
        UnavailableError: the storage cannot be written.
    """
    num_bytes = photo.seek(0, io.SEEK_END)
    photo.seek(0)
    return await _create(backend, num_bytes, photo.read, file_name, spec, source)


async def _create(
    backend: Backend, num_bytes: int, read: Callable[[], bytes], file_name: str, spec: JobSpec, source: str
) -> tuple[list[Submission], list[JobView]]:
    def work(connection: redis.Redis) -> tuple[list[Submission], list[JobView]]:
        with PHOTO_BYTES.take(num_bytes):
            request = Request(path=_plain_name(file_name), spec=spec, data=read(), source=source)
            try:
                submitted = submit_all(backend.settings, [request], connection=connection, storage=backend.storage)
                submissions = [_asked_for_now(connection, each) if spec.at is None else each for each in submitted]
            except InputError as error:
                message = without_paths(str(error), backend.settings)
                raise ApiError(400, message, param="input_reference") from error
        return submissions, view_many(connection, [each.id for each in submissions])

    return await backend.write(work)


def _asked_for_now(connection: redis.Redis, submission: Submission) -> Submission:
    """Queue an existing job whose time has not come."""
    if submission.status != "scheduled":
        return submission
    queue_now(connection, submission.id)
    return replace(submission, status="queued")


def options_of(view: JobView) -> SubmitOptions:
    """Return the parameters of a video, to make another one with.

    Raises:
        ApiError: its record has none.
        InputError: another version of svdq made it.
    """
    if "image" not in view.parameters:
        raise no_such_video(view.id)
    return SubmitOptions().with_defaults_from(view.parameters | {"formats": tuple(view.parameters["formats"])})


async def make_again(backend: Backend, view: JobView, spec: JobSpec) -> tuple[list[Submission], list[JobView]]:
    """Make another video of the photo of a video; returns and raises as `create`."""
    key = view.parameters["image"]
    entry = await backend.in_thread(lambda: backend.storage.entry(key))
    if entry is None:
        raise ApiError(404, f"The photo of {view.name!r} was removed; add it again.")
    photo = PurePosixPath(view.photo.replace("\\", "/"))
    # A job is named by the stem of its photo, unless it was given a name.
    file_name = photo.name if photo.stem == view.name else f"{view.name}.photo"
    spec = replace(spec, folder=spec.folder or view.parameters.get("folder", ""))
    return await _create(backend, entry.size, lambda: backend.storage.read_input(key), file_name, spec, view.source)


def _plain_name(file_name: str) -> Path:
    """Return the last part of a name, whichever system it comes from; never a path."""
    name = file_name.replace("\\", "/").rpartition("/")[2].replace("\0", "").strip()[-MAX_NAME:]
    return Path(name if name not in ("", ".", "..") else "photo")
