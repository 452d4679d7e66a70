"""Submits photos: checks all of them, then stores them, then enqueues their jobs."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path, PurePosixPath

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY
from svdq.pipeline.models.registry import family_of_model
from svdq.producer.control import retry
from svdq.producer.queue import SOURCE_NOTE, connect, read_job, session
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import read_groups
from svdq.producer.status.status import view_many
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import CHUNK, Enqueued, Entry, enqueue_after, enqueue_many, unfinished
from svdq.producer.submitting.family import WITH_PROMPTS, ConfiguredModel
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.options import SubmitOptions
from svdq.producer.submitting.photos import Photo, check_data, check_photos, source_path
from svdq.producer.submitting.prompts import PromptFiles
from svdq.producer.submitting.sizes import crop_warning
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
    #: The model whose video the new job replaces; "" for none.
    replaced_model: str = ""
    #: How much a crop removes of the photo, such as `crop removes 54% of the photo's height`; "" if that is little.
    warning: str = ""


class BadPhotosError(InputError):
    """Some photos cannot be used; nothing was stored or enqueued."""

    def __init__(self, reasons: Sequence[str], num_photos: int) -> None:
        """Create the error."""
        if len(reasons) == 1:
            super().__init__(f"{reasons[0]} Nothing was submitted; --skip-bad leaves it out.")
        else:
            super().__init__(
                f"{len(reasons):,} of {num_photos:,} photos cannot be used, so nothing was submitted; correct or "
                "remove them, or leave them out with --skip-bad."
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


def submit(
    settings: Settings,
    photos: Sequence[str | Path],
    options: SubmitOptions,
    priority: str = "default",
    force: bool = False,
) -> list[Submission]:
    """Submit photos, one job each; return existing jobs unchanged unless `force` is set.

    Raises:
        InputError: a photo or a parameter is not allowed; nothing was stored or enqueued.
        UnavailableError: storage or Redis cannot be reached.
    """
    model = ConfiguredModel.of(settings.model)
    spec = JobSpec(options=(options,), model=model, priority=priority, force=force)
    return list(submit_all(settings, [Request(path=Path(photo), spec=spec) for photo in photos]))


def submit_all(
    settings: Settings,
    requests: Sequence[Request | InputError],
    *,
    skip_bad: bool = False,
    observer: Observer | None = None,
    connection: redis.Redis | None = None,
    storage: Storage | None = None,
) -> Iterator[Submission]:
    """Submit photos: check all, store all, then enqueue their jobs, yielding each job as it is enqueued.

    A `photo.txt` beside a photo is its prompt, unless the request has one.

    After an interruption, submitting the same photos again continues: existing photos and jobs are recognized. Memory
    holds a few hundred bytes per photo, never the contents of many photos. Errors among the requests stand for bad rows
    of a list. The caller handles the errors of a `connection` that it gives. A `storage` that it gives is that of the
    settings.

    Raises:
        BadPhotosError: several photos are bad.
        InputError: a photo or a parameter is not allowed; nothing was stored or enqueued.
        UnavailableError: storage or Redis cannot be reached.
    """
    observer = observer or Observer()
    for spec in {id(request.spec): request.spec for request in requests if isinstance(request, Request)}.values():
        spec.check()
    if connection is not None:
        connection.ping()
    elif settings.redis_url:
        connect(settings).close()  # fails before thousands of photos are checked; changes nothing
    checked = _check(settings, requests, skip_bad, observer)
    storage = storage or Storage(settings.storage)
    with contextlib.nullcontext(connection) if connection is not None else session(settings) as connection:
        for parents in {spec.depends_on for _, spec in checked}:
            unfinished(connection, parents)
        _store(storage, [photo for photo, _ in checked], observer)
        models = _current_models(connection, settings)
        observer.begin("enqueueing", sum(spec.num_jobs for _, spec in checked))
        entries = entries_of(checked)
        while chunk := list(islice(entries, CHUNK)):
            if any(spec.depends_on for _, spec in chunk):
                results = [enqueue_after(connection, entry, spec.depends_on) for entry, spec in chunk]
            else:
                results = enqueue_many(connection, [entry for entry, _ in chunk])
            replaced = _replace(connection, storage, models, results)
            for (entry, _), enqueued in zip(chunk, results, strict=True):
                observer.advance()
                yield _submission(entry, enqueued, replaced.get(entry.job_id, ""))


def _check(
    settings: Settings, requests: Sequence[Request | InputError], skip_bad: bool, observer: Observer
) -> list[tuple[Photo, JobSpec]]:
    paths = [request.path for request in requests if isinstance(request, Request) and request.data is None]
    observer.begin("checking", len(paths))
    results = iter(check_photos(paths, settings.max_pixels, observer.advance))
    prompts = PromptFiles()
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
        raise BadPhotosError(reasons, len(requests))
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
    running = {rank.model for group in read_groups(connection) for rank in group.ranks}
    # Without workers, only an explicit model counts: the workers may use another default.
    asked_for = {settings.model} if "model" in settings.model_fields_set else set()
    return {PurePosixPath(name).name: family_of_model(name) for name in running or asked_for}


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
        is_new=enqueued.is_new or bool(replaced_model),
        at=entry.at if enqueued.is_new else None,
        replaced_model=replaced_model,
        warning=entry.warning if enqueued.is_new else "",
    )
