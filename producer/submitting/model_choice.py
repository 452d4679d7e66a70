"""Chooses the model of new jobs, and queues again what another model made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS, published_model
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.names.model_names import check_name, family_of_model, has_weights, known_model
from svdq.producer import job_control
from svdq.producer.embedded_redis import running_url
from svdq.producer.job import JOBS, model_stem
from svdq.producer.queue import session
from svdq.producer.results.finished_videos import has_files
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view_many
from svdq.producer.status.registries import running_known, running_models
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.entries import Submission
from svdq.producer.threads import ordered_map
from svdq.producer.verdicts import read_verdicts


def configured_model(settings: Settings) -> KnownModel | None:
    """Return the model of the settings; None if its family is not known: `preview` and `simulated` render all.

    Raises InputError if there is no model of its name.
    """
    check_name(settings.model)
    found = known_model(settings.model)
    return None if found is None else replace(found, is_configured=True)


def running_model(connection: redis.Redis, family: str, stem: str, name: str = "") -> KnownModel:
    """Describe the model of a family that workers run; with the `stem` of a name, the one of this name."""
    found = running_known(connection, family, stem) or published_model(family)
    return replace(found, name=name or stem)


def expected_model(
    settings: Settings, connection: redis.Redis | None = None, named: str | None = None
) -> KnownModel | None:
    """Return the configured model, else the workers' if all have models of one family; None if neither is known.

    Of the model `named` in a job, only a worker's model of that name counts, before the configured one. Without a
    connection it connects, unless the embedded server is not running; UnavailableError if it cannot.
    """
    stem = named and model_stem(named)
    configured = configured_model(settings)
    if configured and stem in (None, model_stem(configured.name)):
        return configured
    if connection is None:
        if not (settings.redis_url or running_url(settings.home)):
            return configured
        with session(settings) as connection:
            return expected_model(settings, connection, named)
    models = running_models(connection).items()
    running = {family: name for name, family in models if has_weights(name) and stem in (None, model_stem(name))}
    [(family, name), *others] = running.items() or [(None, "")]
    if not family or others:
        return configured
    return running_model(connection, family, stem or "", name)


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
    return {model_stem(name): family for name, family in models.items()}


def render_again(
    connection: redis.Redis, storage: Storage, models: Mapping[str, str | None], made: Sequence[Submission]
) -> list[Submission]:
    """Requeue finished jobs whose files are gone, or whose video another model made; return what came of all.

    A video of another model that a person has marked to keep stays. The later links of a chain whose video is replaced
    were made of its last frame, and are rendered again, too.
    """
    finished = [each.id for each in made if each.status == JobStatus.FINISHED.value]
    if not finished:
        return list(made)
    views = list(view_many(connection, finished))
    are_there = ordered_map(
        lambda view: has_files(storage, view.id, view.parameters), views, num_threads=storage.num_threads
    )
    before = {each.id: each.job.predecessor for each in made}
    reasons: dict[str, str] = {}
    replaced: set[str] = set()
    for view, verdict, is_there in zip(views, read_verdicts(connection, finished), are_there, strict=True):
        wanted = view.parameters.get("family", DEFAULT_FAMILY)
        able = {name for name, family in models.items() if family in (None, wanted)}
        is_of_another = view.model and able and not {model_stem(view.model), view.parameters.get("model")} & able
        if not is_there:
            reasons[view.id] = "its files are gone, so it is rendered again"
        elif is_of_another and verdict != "keep":
            reasons[view.id] = f"replaces the video that {view.model} made"
            replaced.add(view.id)
        elif before[view.id] in replaced and verdict != "keep":
            reasons[view.id] = "continues a video that is replaced"
            replaced.add(view.id)
    for job_id in list(reasons):
        try:
            job_control.retry(connection, job_id, storage=storage)
        except InputError:  # another process has just changed it
            del reasons[job_id]
    return [
        replace(each, again=reasons[each.id], status="queued", is_new=True) if each.id in reasons else each
        for each in made
    ]
