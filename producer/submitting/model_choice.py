"""Chooses the model of new jobs, says what it cannot make, and queues again what another model made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import DEFAULT_FAMILY, FAMILIES, PARAMETERS, published_model
from svdq.pipeline.models.known_model import Expected, KnownModel
from svdq.pipeline.models.model_name import has_weights, model_stem
from svdq.pipeline.models.names.model_names import check_name, family_of_model, known_model
from svdq.producer import job_control
from svdq.producer.connection import session
from svdq.producer.embedded_redis import running_url
from svdq.producer.job import JOBS, Job
from svdq.producer.results.finished_videos import find_results, has_files
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view_many
from svdq.producer.status.running import Running, read_running
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.parameters import as_flag
from svdq.producer.threads import ordered_map
from svdq.producer.verdicts import read_verdicts


def configured_model(settings: Settings) -> KnownModel | None:
    """Return the model of the settings; None if its family is not known: `preview` and `simulated` render all.

    Raises InputError if there is no model of its name.
    """
    check_name(settings.model)
    found = known_model(settings.model)
    return None if found is None else replace(found, is_configured=True)


def running_model(running: Running, family: str, stem: str, name: str = "") -> KnownModel:
    """Describe the model of a family that workers run; with the `stem` of a name, the one of this name."""
    found = running.known(family, stem) or published_model(family)
    return replace(found, name=name or stem)


def expect(settings: Settings, connection: redis.Redis | None = None, named: str | None = None) -> Expected:
    """Expect the configured model, else the workers' if all have models of one family; no model if neither is known.

    Of several families without the default one, the first: no worker makes videos that are left to the default.

    Of the model `named` in a job, only a worker's model of that name counts, before the configured one. Without a
    connection it connects, unless the embedded server is not running; UnavailableError if it cannot.
    """
    stem = named and model_stem(named)
    configured = configured_model(settings)
    if configured and stem in (None, model_stem(configured.name)):
        return Expected(model=configured)
    running = Running()
    if connection is not None or settings.redis_url or running_url(settings.home):
        with session(settings, connection) as opened:
            running = read_running(opened)
    models = {name: family for name, family in running.models.items() if has_weights(name)}
    families = tuple(name for name in JOBS if name in models.values())
    fitting = {family: name for name, family in models.items() if stem in (None, model_stem(name))}
    is_unclear = len(fitting) > 1 and (configured or None in fitting or DEFAULT_FAMILY in fitting)
    family = None if is_unclear else next((name for name in JOBS if name in fitting), None)
    model = configured if family is None else running_model(running, family, stem or "", fitting[family])
    return Expected(model=model, families=families, unknown="" if model else _why_unknown(settings, running.models))


def _why_unknown(settings: Settings, running: Mapping[str, str | None]) -> str:
    if any(map(has_weights, running)):
        return "the workers do not all have models of one known family"
    if has_weights(settings.model):
        return f"the family of the model {settings.model} is not known here"
    return "" if running or "model" in settings.model_fields_set else "no worker is running and no model is configured"


def why_default(expected: Expected, spell: Callable[[str], str] = as_flag) -> str:
    """Say in a sentence that videos are for the default family as nothing else is known; "" where any will do."""
    if not expected.unknown:
        return ""
    others = (f"{spell('family')} {name} for {PARAMETERS[name].title}" for name in JOBS if name != DEFAULT_FAMILY)
    title = PARAMETERS[DEFAULT_FAMILY].title
    return f"The videos are for {title}, the default: {expected.unknown}. Give {' or '.join(others)}."


def current_models(settings: Settings, running: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the last parts of the names of the models that render jobs now, with their families where known."""
    # Without workers, only an explicit model counts: the workers may use another default.
    asked_for = {settings.model: family_of_model(settings.model)} if "model" in settings.model_fields_set else {}
    models = running or asked_for
    return {model_stem(name): family for name, family in models.items()}


def render_again(
    connection: redis.Redis, storage: Storage, made: Sequence[Submission], settings: Settings | None = None
) -> list[Submission]:
    """Requeue finished jobs whose files are gone, or whose video another model made; return what came of all.

    Without settings, no video is another model's. A video of another model that a person has marked to keep stays. The
    later links of a chain whose video is replaced were made of its last frame, and are rendered again, too.
    """
    finished = [each.id for each in made if each.status == JobStatus.FINISHED.value]
    if not finished:
        return list(made)
    views = list(view_many(connection, finished))
    are_there = [
        *ordered_map(lambda view: has_files(storage, view.id, view.parameters), views, num_threads=storage.num_threads)
    ]
    gone = {view.id for view, is_there in zip(views, are_there, strict=True) if not is_there}
    gone -= {result.job_id for result in find_results(storage, job_ids=gone)} if gone else set()  # in other folders
    models = {} if settings is None else current_models(settings, read_running(connection).models)
    before = {each.id: each.job.predecessor for each in made}
    reasons: dict[str, str] = {}
    replaced: set[str] = set()
    for view, verdict in zip(views, read_verdicts(connection, finished), strict=True):
        wanted = view.parameters.get("family", DEFAULT_FAMILY)
        able = {name for name, family in models.items() if family in (None, wanted)}
        is_of_another = view.model and able and not {model_stem(view.model), view.parameters.get("model")} & able
        if view.id in gone:
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


def _is_for(model: KnownModel, job: Job, at: datetime | None) -> bool:
    """Return whether the expected model makes a job that is queued at some time, as far as is known."""
    # Later there may be other workers, and the configured model decides only about its family.
    is_for_it = model.family.name == job.family if model.is_configured else at is None
    return is_for_it and job.model in (None, model_stem(model.name))


def threshold_for(
    model: KnownModel | None, job: Job, at: datetime | None, speedup: str, spell: Callable[[str], str]
) -> float:
    """Return the step_cache with which the expected model makes a video as many times as fast as `1.5x` says."""
    if model is None or model.is_assumed or not _is_for(model, job, at):
        raise InputError(
            f"{spell('step_cache')} {speedup} needs the model, which is not known here; give a threshold, such as "
            "0.06.",
            field="step_cache",
        )
    return model.threshold_for(job.parameters, speedup)


def check_step_cache(model: KnownModel | None, job: Job, at: datetime | None) -> None:
    """Raise InputError if the expected model is known, and skips none of the steps of a job that asks for it."""
    if getattr(job, "step_cache", 0.0) and model and not model.is_assumed and _is_for(model, job, at):
        model.complete(job.parameters)


def check_last_frame(model: KnownModel | None, job: Job, at: datetime | None, spell: Callable[[str], str]) -> None:
    """Raise InputError if a job has a last frame that the expected model does not take."""
    if model is None or model.takes_last_photo or not getattr(job, "has_last_photo", False):
        return
    if _is_for(model, job, at):
        is_loop = getattr(job, "loop", False)
        whose = f"configured model {model.name}" if model.is_configured else f"workers' model {model.name}".rstrip()
        raise InputError(
            f"{spell('loop' if is_loop else 'last_image')} does not apply to the {whose}, which takes no last "
            f"frame; leave it out, or use a model that takes one, such as {_takes_last_photo()}"
            f"{' (' + spell('boomerang') + ' works with all)' if is_loop else ''}.",
            field="loop" if is_loop else "last_image",
        )


def _takes_last_photo() -> str:
    """Return the hub id of a model that takes a photo of the last frame."""
    return next(
        name
        for family in FAMILIES
        for name, model in family.models.items()
        if family.takes_last_photo(model.facts) and not family.needs_last_photo(model.facts)
    )
