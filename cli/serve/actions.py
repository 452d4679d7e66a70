"""What the page and the API do with jobs, each through the function that the command line uses."""

import asyncio
import contextlib
import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import redis
from starlette.datastructures import State

from svdq.cli.serve.api_errors import ApiError, no_such_video, without_paths
from svdq.cli.serve.backend import PHOTO_BYTES, Backend
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer import job_control
from svdq.producer.job_control import queue_now
from svdq.producer.queue import SvdqQueue, fetch_many, queues
from svdq.producer.results.prune import remove_job
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.registries import newest_ids
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import ExpectedModel, SubmitOptions
from svdq.producer.submitting.submission import Request, Submission, expected_model, submit_all

#: Seconds that a request waits for a video in flight to stop, and seconds after which nobody waits any more.
WAIT_S = 1.5
GIVE_UP_S = 600.0
POLL_S = 0.25


def act(connection: redis.Redis, action: str, job_ids: Sequence[str]) -> list[str]:
    """Do an action, on each of the jobs if it is one on jobs; return a sentence for each that it does not apply to.

    Raises:
        InputError: there is no such action.
    """
    match action:
        case "pause":
            job_control.pause(connection)
        case "resume":
            job_control.resume(connection)
        case "cancel":
            outcomes = job_control.cancel_many(connection, job_ids)
            return [str(outcome) for _, outcome in outcomes if isinstance(outcome, InputError)]
        case "cancel-waiting":
            for _ in job_control.cancel_many(connection, newest_ids(connection, statuses=job_control.WAITING)):
                pass  # those that have just begun or ended are not meant
        case "front":
            return _each(job_ids, lambda job_id: _move_to_front(connection, job_id))
        case "retry":
            return _each(job_ids, lambda job_id: job_control.retry(connection, job_id))
        case "keep" | "reject":
            job_control.give(connection, job_ids, "keep" if action == "keep" else "reject")
        case "unmark":
            job_control.give(connection, job_ids, None)
        case _:
            raise InputError(f"There is no action {action[:80]!r}; load the page again.")
    return []


def _each(job_ids: Iterable[str], do: Callable[[str], object]) -> list[str]:
    problems = []
    for job_id in job_ids:
        try:
            do(job_id)
        except InputError as error:
            problems.append(str(error))
    return problems


def _move_to_front(connection: redis.Redis, job_id: str) -> None:
    """Make a queued job the next one of all: move it to the front of the most urgent queue that has any."""
    waiting: list[SvdqQueue] = [queue for queue in queues(connection) if queue.count]
    priority = waiting[0].name.removeprefix("svdq-") if waiting else None
    job_control.move(connection, job_id, front=True, priority=priority)


async def remove(state: State, job_id: str) -> None:
    """Remove a job; one that is in flight is canceled, and removed when it has stopped.

    Raises:
        ApiError: Redis is away.
        UnavailableError: the storage cannot be reached.
    """
    if not await _remove_now(state, job_id):
        task = asyncio.create_task(_remove_later(state, job_id))
        state.removals[job_id] = task
        task.add_done_callback(lambda _: state.removals.pop(job_id, None))
        await asyncio.wait({task}, timeout=WAIT_S)


async def _remove_later(state: State, job_id: str) -> None:
    end = time.monotonic() + GIVE_UP_S
    is_removed = False
    while not is_removed and time.monotonic() < end:
        await asyncio.sleep(POLL_S)
        with contextlib.suppress(ApiError, UnavailableError):  # Redis or the storage is away
            is_removed = await _remove_now(state, job_id)


async def _remove_now(state: State, job_id: str) -> bool:
    """Remove a job; return False while it is in flight."""

    def work(connection: redis.Redis) -> bool:
        [found] = fetch_many(connection, [job_id])
        return found is None or remove_job(connection, state.backend.storage, job_id)

    is_removed: bool = await state.backend.write(work)
    state.polls.forget(job_id)
    state.pages.forget()
    return is_removed


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
