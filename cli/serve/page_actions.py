"""What the buttons of the page do."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, TypeVar

import redis
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from svdq.cli.serve.access import mine_of
from svdq.cli.serve.api_errors import ApiError, Json, without_folders
from svdq.cli.serve.backend import Backend, draft_of
from svdq.cli.serve.bodies import limited
from svdq.cli.serve.form import label_of, read_changes
from svdq.cli.serve.page_videos import MAX_JOBS, find_video, ids_of
from svdq.cli.serve.videos import JOB_ID
from svdq.pipeline.errors import InputError, first_error
from svdq.producer import job_control
from svdq.producer.pauses import free, pause, resume
from svdq.producer.queue import no_such_job, priority_of, queues, statuses
from svdq.producer.status.job_view import view_many
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import SEED_BITS
from svdq.producer.verdicts import read_verdicts, record_verdict

REMOVED = "The video was removed."
_JobId = Annotated[str, StringConstraints(pattern=f"^{JOB_ID.pattern}$")]


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
            waiting = ids_of(connection, job_control.WAITING, () if asked.everybody else mine)
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
    view = await find_video(request, asked.id)
    draft = draft_of(view).overridden(read_changes(asked.changes))
    if draft.seed is None or not asked.changes:
        draft = replace(draft, seed=secrets.randbits(SEED_BITS))
    priority = priority_of(view.queue) or "default"
    wanted = JobSpec(drafts=(draft,), priority=priority, owner=request.state.owner)
    wanted.check(label_of)
    [[submission], _] = await backend.create_again(view, wanted)
    return Json({"id": submission.id, "is_new": submission.is_new, "status": submission.status})


async def _read(request: Request, model: type[_Body]) -> _Body:
    try:
        return model.model_validate_json(await limited(request).body())
    except ValidationError as error:
        reason = first_error(error)["msg"]
        raise ApiError(400, f"The request is not one that the page sends ({reason}); load the page again.") from error
