"""The model that videos are for: the one that is expected, and jobs that are queued again for another one."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.models.model_file import SUFFIX, is_model_file, read_model_file
from svdq.pipeline.models.model_names import family_of_model, has_weights
from svdq.producer.embedded_redis import running_url
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.job_control import cancel, check, retry
from svdq.producer.queue import fetch, read_arguments, session
from svdq.producer.records import REPLACED_NOTE
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view_many
from svdq.producer.status.registries import running_defaults, running_models
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Enqueued, Entry, enqueue_many
from svdq.producer.submitting.job_spec import make_job
from svdq.producer.submitting.parameters import ExpectedModel, SubmitOptions, as_key


def configured_model(settings: Settings) -> ExpectedModel | None:
    """Return the model of the settings; None if its family is not known: `preview` and `simulated` render all."""
    family = family_of_model(settings.model)
    if not family:
        return None
    defaults = read_model_file(Path(settings.model)).defaults if is_model_file(settings.model) else {}
    return ExpectedModel(name=settings.model, family=family, defaults=defaults)


def expected_model(settings: Settings, connection: redis.Redis | None = None) -> ExpectedModel | None:
    """Return the configured model, else that of the workers if all have models of one family; None if neither says it.

    Without a connection it connects, unless the embedded server is not running; UnavailableError if it cannot.
    """
    if configured := configured_model(settings):
        return configured
    if connection is None:
        if not (settings.redis_url or running_url(settings.home)):
            return None
        with session(settings) as connection:
            return expected_model(settings, connection)
    running = {family: name for name, family in running_models(connection).items() if has_weights(name)}
    [(family, name), *others] = running.items() or [(None, "")]
    if not family or others:
        return None
    defaults = running_defaults(connection).get(family, {})
    return ExpectedModel(name=name, family=family, is_configured=False, defaults=defaults)


def why_default(settings: Settings, connection: redis.Redis) -> str:
    """Say in a sentence that videos are for the default family as nothing else is known; "" where any will do."""
    running = running_models(connection)
    if any(map(has_weights, running)):
        reason = "the workers do not all have models of one known family"
    elif has_weights(settings.model):
        reason = f"the family of the model {settings.model} is not known here"
    elif running or "model" in settings.model_fields_set:
        return ""
    else:
        reason = "no worker is running and no model is configured"
    others = " or ".join(f"--family {name} for {PARAMETERS[name].title}" for name in JOBS if name != DEFAULT_FAMILY)
    return f"The videos are for {PARAMETERS[DEFAULT_FAMILY].title}, the default: {reason}. Give {others}."


def current_models(connection: redis.Redis, settings: Settings) -> dict[str, str | None]:
    """Return the last parts of the names of the models that render jobs now, with their families where known."""
    # Without workers, only an explicit model counts: the workers may use another default.
    asked_for = {settings.model: family_of_model(settings.model)} if "model" in settings.model_fields_set else {}
    models = running_models(connection) or asked_for
    return {PurePosixPath(name).name.removesuffix(SUFFIX): family for name, family in models.items()}


def replace_videos(
    connection: redis.Redis, storage: Storage, models: Mapping[str, str | None], enqueued: Sequence[Enqueued]
) -> dict[str, str]:
    """Requeue finished jobs whose video another model made; return these models by job id."""
    existing = [each.rq_job for each in enqueued if not each.is_new]
    finished = [job.id for job in existing if job.get_status(refresh=False) is JobStatus.FINISHED]
    replaced = {}
    for view in view_many(connection, finished) if models and finished else ():
        wanted = view.parameters.get("family", DEFAULT_FAMILY)
        able = {name for name, family in models.items() if family in (None, wanted)}
        if view.model and able and PurePosixPath(view.model).name not in able:
            with contextlib.suppress(InputError):  # another process has just changed it
                retry(connection, view.id, storage=storage)
                replaced[view.id] = view.model
    return replaced


def make_anew(connection: redis.Redis, job_id: str, family: str) -> str:
    """Queue the photo and the prompt of a job anew for another family, and cancel the job if it is queued.

    A recorded prompt counts, too. Parameters that both families have and that are not the defaults stay. A job of that
    family is only retried. Returns the id of the queued job.

    Raises:
        InputError: the other family cannot make such a video, or the job is not one of svdq or has another status.
    """
    check(connection, "retry --family", [job_id])
    rq_job = fetch(connection, job_id)
    arguments, is_queued = read_arguments(rq_job), rq_job.get_status(refresh=False) is JobStatus.QUEUED
    if arguments is None:
        raise InputError(f"Job {job_id!r} is not a job of this version of svdq; submit its photo again.")
    job = arguments.job
    if job.family == family:
        if not is_queued:
            retry(connection, job_id)
        return job_id
    notes = {name: text for name, text in arguments.notes.items() if name != REPLACED_NOTE}
    fields = type(job).model_fields
    kept = {name for name in VIDEO_FIELDS if name in fields and getattr(job, name) != fields[name].default}
    if kept & {"width", "height"}:
        kept |= {"width", "height"}
    was_drawn = job.digest(seed_was_drawn=True) == job_id
    if was_drawn:
        kept.remove("seed")
    options: dict[str, Any] = {name: notes[name] for name in ("prompt", "negative_prompt") if name in notes}
    options |= {name: getattr(job, name) for name in kept}
    options = {name: value for name, value in options.items() if name in JOBS[family].model_fields}
    options["family"] = family
    made = make_job(SubmitOptions(**options), spell=as_key, image=job.image, name=job.name, folder=job.folder)
    is_named = not was_drawn and job.digest(seed_was_drawn=False) != job_id
    entry = Entry(
        job=made,
        job_id=made.digest(seed_was_drawn=was_drawn, given_name=job.name if is_named else ""),
        photo=arguments.photo,
        priority=rq_job.origin.removeprefix("svdq-"),
        notes={name: text for name, text in notes.items() if name not in options},
    )
    enqueue_many(connection, [entry])
    if is_queued:
        cancel(connection, job_id)
    return entry.job_id
