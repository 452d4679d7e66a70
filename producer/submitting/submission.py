"""Submits photos: checks all of them, then stores them, then enqueues their jobs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.models.model_names import family_of_model, has_weights
from svdq.producer.embedded_redis import running_url
from svdq.producer.files import make_home
from svdq.producer.job import JOBS, VIDEO_FIELDS
from svdq.producer.job_control import cancel, check, retry, unfinished
from svdq.producer.queue import (
    SOURCE_NOTE,
    connect,
    database_id,
    fetch,
    notes_of,
    photo_of,
    read_job,
    session,
    source_of,
)
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view_many
from svdq.producer.status.registries import running_models
from svdq.producer.status.selection import complete_ids
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import CHUNK, Enqueued, Entry, enqueue_after, enqueue_many
from svdq.producer.submitting.job_spec import JobSpec, make_job, read_folder
from svdq.producer.submitting.parameters import WITH_PROMPTS, ExpectedModel, SubmitOptions, as_flag, as_key
from svdq.producer.submitting.photos import Photo, check_data, check_photos, crop_warning, source_path
from svdq.producer.submitting.sources import PromptFiles, Sources, find_photos, usable_prompt
from svdq.producer.threads import Budget, ordered_map

#: Bytes of photos that are held in memory to be stored.
_BYTES = Budget(1 << 25)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A photo and what to make of it."""

    path: Path
    spec: JobSpec
    #: Where the photo is, from the submitted folder on; "" means its own folder and name.
    source: str = ""
    #: Prefix of errors: where the user asked for it, such as `list.csv, line 7: `.
    where: str = ""
    #: The bytes of an upload, whose path is only a name; None: they are in the file.
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The outcome of submitting one job."""

    #: Its id.
    id: str
    #: Storage key of the photo.
    image: str
    #: Seed of the job; the recorded seed if the job existed.
    seed: int
    #: RQ status of the job.
    status: str
    #: Name of the job.
    name: str
    #: Path of its photo.
    photo: str
    #: Whether it was enqueued now; otherwise the job existed before.
    is_new: bool
    #: When a new job will be queued, with a time zone; None means that it is queued.
    at: datetime | None = None
    #: How a job had ended that is queued again: failed, stopped or canceled; "" for others.
    was: str = ""
    #: The model whose video the new job replaces; "" for none.
    replaced_model: str = ""
    #: How much a crop removes of the photo, such as `crop removes 54% of the photo's height`; "" if that is little.
    warning: str = ""


class BadPhotosError(InputError):
    """Some photos cannot be used; nothing was stored or enqueued."""

    def __init__(self, reasons: Sequence[str], num_photos: int, skip_bad: str) -> None:
        """Create the error; `skip_bad` is the name of the option that leaves photos out."""
        if len(reasons) == 1:
            super().__init__(f"{reasons[0]} Nothing was submitted; {skip_bad} leaves it out.")
        else:
            super().__init__(
                f"{len(reasons):,} of {num_photos:,} photos cannot be used, so nothing was submitted; correct or "
                f"remove them, or leave them out with {skip_bad}."
            )
        #: The reason for each photo, if the message does not contain it.
        self.reasons = tuple(reasons) if len(reasons) > 1 else ()


class Observer:
    """Receives the progress of a submission; this base class ignores it."""

    def begin(self, work: str, total: int) -> None:
        """Handle the start of a phase, such as `checking`, of `total` photos or jobs."""

    def advance(self) -> None:
        """Handle the end of one item of the phase."""

    def leave_out(self, reason: str) -> None:
        """Handle a bad photo that is left out."""

    def note(self, text: str) -> None:
        """Handle a sentence for the user."""


def configured_model(settings: Settings) -> ExpectedModel | None:
    """Return the model of the settings; None if its family is not known: `preview` and `simulated` render all."""
    family = family_of_model(settings.model)
    return ExpectedModel(name=settings.model, family=family) if family else None


def expected_model(settings: Settings, connection: redis.Redis | None = None) -> ExpectedModel | None:
    """Return the configured model, else that of the workers if all have models of one family.

    None if neither says the family. Without a connection it connects, unless the embedded server is not running.

    Raises:
        UnavailableError: Redis cannot be reached.
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
    return ExpectedModel(name=name, family=family, is_configured=False) if family and not others else None


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


def submit(
    settings: Settings,
    photos: str | Path | Iterable[str | Path],
    options: SubmitOptions = SubmitOptions(),  # noqa: B008 - it is frozen
    priority: str = "default",
    force: bool = False,
    *,
    recursive: bool = False,
    skip_bad: bool = False,
    at: datetime | None = None,
    output: str = "",
) -> list[Submission]:
    """Submit photos, one job each; of existing jobs, queue the failed and canceled ones again, and with `force` all.

    Args:
        settings: of this process.
        photos: files, folders, and patterns such as `holiday/*.jpg`, or one of them.
        options: the parameters of the videos.
        priority: selects the queue.
        force: make new jobs although the same ones exist.
        recursive: include subfolders; videos keep the folders of their photos.
        skip_bad: leave out bad photos instead of submitting none.
        at: when to queue the jobs; without a time zone it is local time.
        output: folder for the files, below outputs/ of the storage.

    Raises:
        InputError: a photo or a parameter is not allowed; nothing was stored or enqueued.
        UnavailableError: storage or Redis cannot be reached.
    """
    words = [str(photo) for photo in ([photos] if isinstance(photos, str | Path) else photos)]
    if not words:
        return []
    spec = JobSpec(
        options=(options,),
        model=expected_model(settings),
        priority=priority,
        folder=read_folder(output),
        at=None if at is None else at.astimezone(),
        force=force,
    )
    found = find_photos(words, recursive=recursive, storage=Storage(settings.storage).folder, spell=str)
    return list(submit_all(settings, requests_for(found, spec), skip_bad=skip_bad, spell=str))


def requests_for(sources: Sources, spec: JobSpec) -> list[Request]:
    """Ask for the same videos of each photo; those of subfolders go to folders of the same names."""
    specs = {
        below: replace(spec, folder=read_folder("/".join(filter(None, (spec.folder, below)))))
        for below in {photo.folder for photo in sources.photos}
    }
    return [Request(path=photo.path, spec=specs[photo.folder], source=photo.source) for photo in sources.photos]


def make_anew(connection: redis.Redis, job_id: str, family: str) -> str:
    """Queue the photo and the prompt of a job anew for another family, and cancel the job if it is queued.

    A prompt beside the photo counts, too, although a family without prompts has ignored it. The parameters
    stay that both families have and that were not left at their defaults. A job of that family is only retried.

    Returns:
        The id of the job that is queued.

    Raises:
        InputError: the other family cannot make such a video, or the job is not one of svdq or has another status.
    """
    check(connection, "retry --family", [job_id])
    rq_job = fetch(connection, job_id)
    job, is_queued = read_job(rq_job), rq_job.get_status(refresh=False) is JobStatus.QUEUED
    if job is None:
        raise InputError(f"Job {job_id!r} is not a job of this version of svdq; submit its photo again.")
    if job.family == family:
        if not is_queued:
            retry(connection, job_id)
        return job_id
    notes, fields = notes_of(rq_job), type(job).model_fields
    if source := source_of(rq_job):
        notes[SOURCE_NOTE] = source
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
        photo=photo_of(rq_job),
        priority=rq_job.origin.removeprefix("svdq-"),
        notes={name: text for name, text in notes.items() if name not in options},
    )
    enqueue_many(connection, [entry])
    if is_queued:
        cancel(connection, job_id)
    return entry.job_id


def submit_all(
    settings: Settings,
    requests: Sequence[Request | InputError],
    *,
    skip_bad: bool = False,
    observer: Observer | None = None,
    connection: redis.Redis | None = None,
    storage: Storage | None = None,
    spell: Callable[[str], str] = as_flag,
) -> Iterator[Submission]:
    """Submit photos: check all, store all, then enqueue their jobs, yielding each job as it is enqueued.

    A `photo.txt` beside a photo is its prompt, unless the request has one.

    After an interruption, submitting the same photos again continues: existing photos and jobs are recognized. Memory
    holds a few hundred bytes per photo, never the contents of many photos. Errors among the requests stand for bad rows
    of a list. The caller handles the errors of a `connection` that it gives. A `storage` that it gives is that of the
    settings. `spell` returns the name of a parameter for errors.

    Raises:
        BadPhotosError: several photos are bad.
        InputError: a photo or a parameter is not allowed; nothing was stored or enqueued.
        UnavailableError: storage or Redis cannot be reached.
    """
    observer = observer or Observer()
    requests = _with_family_of_prompts(requests)
    for spec in _each(request.spec for request in requests if isinstance(request, Request)):
        spec.check(spell)
    if connection is not None:
        connection.ping()
    elif settings.redis_url:
        connect(settings).close()  # fails before thousands of photos are checked; changes nothing
    checked = _check(settings, requests, skip_bad, observer, spell)
    storage = storage or Storage(settings.storage)
    with contextlib.nullcontext(connection) if connection is not None else session(settings) as connection:
        parents = {ids: complete_ids(connection, ids) for ids in {spec.depends_on for _, spec in checked} if ids}
        for job_ids in parents.values():
            unfinished(connection, job_ids)
        if storage.folder is not None and storage.folder.is_relative_to(settings.home):
            with contextlib.suppress(OSError):  # the storage says why
                make_home(settings.home)
        storage.claim(partial(database_id, connection))
        _store(storage, [photo for photo, _ in checked], observer)
        models = _current_models(connection, settings)
        is_open = any(spec.is_open for spec in _each(spec for _, spec in checked))
        if is_open and (sentence := why_default(settings, connection)):
            observer.note(sentence)
        observer.begin("enqueueing", sum(spec.num_jobs for _, spec in checked))
        entries = entries_of(checked)
        while chunk := list(islice(entries, CHUNK)):
            if any(spec.depends_on for _, spec in chunk):
                results = [enqueue_after(connection, entry, parents.get(spec.depends_on, ())) for entry, spec in chunk]
            else:
                results = enqueue_many(connection, [entry for entry, _ in chunk])
            replaced = _replace(connection, storage, models, results)
            for (entry, _), enqueued in zip(chunk, results, strict=True):
                observer.advance()
                yield _submission(entry, enqueued, replaced.get(entry.job_id, ""))


def _each(specs: Iterable[JobSpec]) -> Iterable[JobSpec]:
    """Return specs that many photos share once each."""
    return {id(spec): spec for spec in specs}.values()


def _with_family_of_prompts(requests: Sequence[Request | InputError]) -> Sequence[Request | InputError]:
    """Choose a family with prompts for videos whose family is open if one of their photos has a prompt."""
    photos = [request for request in requests if isinstance(request, Request)]
    family = next(name for name in JOBS if name in WITH_PROMPTS)
    model = ExpectedModel(name="", family=family, is_configured=False)
    prompted = {id(spec): replace(spec, model=model) for spec in _each(each.spec for each in photos) if spec.is_open}
    if not any(id(each.spec) in prompted and each.data is None and usable_prompt(each.path) for each in photos):
        return requests
    return [
        replace(each, spec=prompted.get(id(each.spec), each.spec)) if isinstance(each, Request) else each
        for each in requests
    ]


def _check(
    settings: Settings,
    requests: Sequence[Request | InputError],
    skip_bad: bool,
    observer: Observer,
    spell: Callable[[str], str],
) -> list[tuple[Photo, JobSpec]]:
    paths = [request.path for request in requests if isinstance(request, Request) and request.data is None]
    observer.begin("checking", len(paths))
    results = iter(check_photos(paths, settings.max_pixels, observer.advance))
    prompts = PromptFiles(spell)
    checked, reasons = [], []
    for request in requests:
        if isinstance(request, InputError):
            reasons.append(str(request))
            continue
        try:
            if request.data is not None:
                found: Photo | InputError = check_data(request.data, request.path, settings.max_pixels)
            else:
                found = next(results)
            if isinstance(found, InputError):
                raise found
            spec = request.spec if request.data is not None else prompts.spec_for(request.spec, request.path)
            checked.append((replace(found, source=_source_of(request), data=request.data), spec))
        except InputError as error:
            reasons.append(f"{request.where}{error}")
    if reasons and (not skip_bad or not checked):
        if len(requests) == 1:
            raise InputError(reasons[0])
        raise BadPhotosError(reasons, len(requests), spell("skip_bad"))
    for reason in reasons:
        observer.leave_out(reason)
    if prompts.num_ignored:
        observer.note(
            f"Prompts (.txt) that are ignored, because this family of models takes none: {prompts.num_ignored:,}; "
            f"give --family {' or '.join(sorted(WITH_PROMPTS))} if the workers' model takes them."
        )
    return checked


def _source_of(request: Request) -> str:
    if request.source:
        return request.source
    folder = "" if request.data is not None else request.path.absolute().parent.name
    return source_path(folder, request.path.name)


def _store(storage: Storage, photos: Sequence[Photo], observer: Observer) -> None:
    observer.begin("storing", len(photos))
    for _ in ordered_map(lambda photo: store(storage, photo), photos, num_threads=storage.num_threads):
        observer.advance()


def store(storage: Storage, photo: Photo) -> None:
    """Store a photo, unless the storage has it."""
    if not storage.has_input(photo.key, photo.num_bytes):
        with _BYTES.take(photo.num_bytes):
            storage.write_bytes(photo.key, photo.read())


def _current_models(connection: redis.Redis, settings: Settings) -> dict[str, str | None]:
    """Return the models that render jobs now, none when that is unknown; with their families where they are known.

    Only the last part of a folder or hub id: the same model in another folder is the same model.
    """
    # Without workers, only an explicit model counts: the workers may use another default.
    asked_for = {settings.model: family_of_model(settings.model)} if "model" in settings.model_fields_set else {}
    models = running_models(connection) or asked_for
    return {PurePosixPath(name).name: family for name, family in models.items()}


def _replace(
    connection: redis.Redis, storage: Storage, models: Mapping[str, str | None], enqueued: Sequence[Enqueued]
) -> dict[str, str]:
    """Requeue finished jobs whose video another model made; return these models by job id."""
    finished = [
        job.rq_job.id
        for job in enqueued
        if not job.is_new and job.rq_job.get_status(refresh=False) is JobStatus.FINISHED
    ]
    replaced = {}
    for view in view_many(connection, finished) if models and finished else ():
        # A model of another family cannot make it.
        able = {
            name for name, family in models.items() if family in (None, view.parameters.get("family", DEFAULT_FAMILY))
        }
        if view.model and able and PurePosixPath(view.model).name not in able:
            with contextlib.suppress(InputError):  # another process has just changed it
                retry(connection, view.id, storage=storage)
                replaced[view.id] = view.model
    return replaced


def entries_of(checked: Iterable[tuple[Photo, JobSpec]]) -> Iterator[tuple[Entry, JobSpec]]:
    """Make the jobs of checked photos, each with what was asked for."""
    index = 1
    for photo, spec in checked:
        for job, job_id in spec.jobs(photo, index):
            yield (
                Entry(
                    job=job,
                    job_id=job_id,
                    photo=photo.shown_path,
                    priority=spec.priority,
                    at=spec.at,
                    notes=dict(spec.notes) | ({SOURCE_NOTE: photo.source} if photo.source else {}),
                    warning=crop_warning(photo.size, job),
                ),
                spec,
            )
            index += 1


def _submission(entry: Entry, enqueued: Enqueued, replaced_model: str) -> Submission:
    is_new = enqueued.is_new or bool(enqueued.was)
    recorded = entry.job if enqueued.is_new else read_job(enqueued.rq_job)
    if recorded is None:
        raise SvdqError(f"Job {entry.job_id} is in Redis but its parameters cannot be read; submit with --force.")
    return Submission(
        id=entry.job_id,
        image=recorded.image,
        seed=recorded.seed,
        status="queued" if replaced_model else enqueued.rq_job.get_status(refresh=False).value,
        name=recorded.name,
        photo=entry.photo,
        is_new=is_new or bool(replaced_model),
        at=entry.at if is_new else None,
        was=enqueued.was,
        replaced_model=replaced_model,
        warning=entry.warning if is_new else "",
    )
