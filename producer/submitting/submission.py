"""Submits photos: checks all of them, then stores them, then enqueues their jobs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TypeGuard

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.families import published_model
from svdq.producer import keys
from svdq.producer.files import make_home
from svdq.producer.job import model_stem
from svdq.producer.job_control import GOING, unfinished
from svdq.producer.queue import connect, database_id, session
from svdq.producer.settings import Settings
from svdq.producer.status.registries import counts
from svdq.producer.status.selection import complete_ids
from svdq.producer.storage.storage import MARKER, Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import CHUNK, enqueue_chain, enqueue_many
from svdq.producer.submitting.entries import Entry, Submission
from svdq.producer.submitting.foresight import check_max_waiting, foresee
from svdq.producer.submitting.job_spec import ANY_PHOTO, JobSpec
from svdq.producer.submitting.loras import KnownLoras
from svdq.producer.submitting.model_choice import current_models, expected_model, render_again, why_default
from svdq.producer.submitting.parameters import WITH_PROMPTS, as_flag
from svdq.producer.submitting.photo_requests import requests_for
from svdq.producer.submitting.photos import Photo, check_photos, source_path
from svdq.producer.submitting.sources import PhotoRequest, PromptFiles, find_photos, usable_prompt
from svdq.producer.text import count, in_zone
from svdq.producer.threads import Budget, ordered_map

_BYTES = Budget(1 << 25)  # bytes of photos that are held in memory to be stored


class BadPhotosError(InputError):
    """Some photos cannot be used; nothing was stored or enqueued. `skip_bad` names the option that leaves them out."""

    def __init__(self, reasons: Sequence[str], num_photos: int, skip_bad: str) -> None:
        #: The reason for each photo, if the message does not contain it.
        self.reasons = tuple(reasons) if len(reasons) > 1 else ()
        number = f"{len(reasons):,} of {num_photos:,} photos cannot be used, so nothing was submitted"
        super().__init__(
            f"{number}; correct or remove them, or leave them out with {skip_bad}."
            if self.reasons
            else f"{reasons[0]} Nothing was submitted; {skip_bad} leaves it out."
        )


class Observer:
    """Receives the progress of a submission; this base class ignores it."""

    def begin(self, work: str, total: int) -> None:
        """Begin a phase, such as `checking`, of `total` photos or jobs."""

    def advance(self) -> None:
        """Count one of them as done."""

    def leave_out(self, reason: str) -> None:
        """Record a bad photo that is left out."""

    def note(self, text: str) -> None:
        """Show a sentence."""


def submit(
    settings: Settings,
    photos: str | Path | Iterable[str | Path],
    options: Draft = Draft(),  # noqa: B008 - it is frozen
    priority: str = "default",
    force: bool = False,
    *,
    recursive: bool = False,
    skip_bad: bool = False,
    at: datetime | None = None,
    output: str = "",
    last_image: str | Path | None = None,
    then: str | Sequence[str] = (),
) -> list[Submission]:
    """Submit photos, one job each; of existing jobs, queue the failed and canceled ones again.

    `photos` are files, folders, and patterns such as `holiday/*.jpg`, or one of them; `recursive` includes subfolders,
    and videos keep the folders of their photos. `force` makes new jobs although the same ones exist, and `skip_bad`
    leaves out bad photos. `at` is when to queue the jobs, in local time if it has no time zone, `output` a folder below
    outputs/ of the storage, and `last_image` the last frame of photos without `NAME.last.jpg`. Each prompt of `then`,
    which may be "", continues a video in a separate job, which is returned, too. Raises as `submit_all`.
    """
    words = [str(photo) for photo in ([photos] if isinstance(photos, str | Path) else photos)]
    if not words:
        return []
    spec = JobSpec(
        options=(options,),
        model=expected_model(settings, named=options.model),
        priority=priority,
        at=None if at is None else in_zone(at),
        then=(then,) if isinstance(then, str) else tuple(then),
        force=force,
    ).with_output(output or settings.output)
    storage = Storage.open_for_command(settings.storage)
    found = find_photos(words, recursive=recursive, storage=storage.folder, spell=str)
    requests = requests_for(found, spec, Path(last_image) if last_image else None)
    return list(submit_all(settings, requests, skip_bad=skip_bad, spell=str, storage=storage))


def submit_all(
    settings: Settings,
    requests: Sequence[PhotoRequest | InputError],
    *,
    skip_bad: bool = False,
    dry_run: bool = False,
    observer: Observer | None = None,
    connection: redis.Redis | None = None,
    storage: Storage | None = None,
    spell: Callable[[str], str] = as_flag,
) -> Iterator[Submission]:
    """Submit photos: check all, store all, then enqueue their jobs, yielding each job as it is enqueued.

    A `photo.txt` beside a photo is its prompt, unless the request has one. Errors among the requests stand for bad rows
    of a list. Submitting again continues after an interruption. Memory holds a few hundred bytes per photo.
    With `dry_run`, nothing is stored or enqueued, and the status of a new job is "new". `connection` and `storage` are
    those of the settings; `spell` returns the name of a parameter for errors. Raises UnavailableError, and InputError
    or BadPhotosError before anything is stored or enqueued, such as TooManyWaitingError.
    """
    observer = observer or Observer()
    requests = _with_family_of_prompts(requests)
    for spec in _specs(requests):
        spec.check(spell)
    if connection is not None:
        connection.ping()
    elif settings.redis_url:
        connect(settings).close()  # fails before thousands of photos are checked; changes nothing
    look_up = _look_up(settings, connection, spell)
    checked = _check(settings.max_pixels, requests, skip_bad, observer, spell, look_up)
    del look_up  # with the specs that it has seen
    storage = storage or Storage.open_for_command(settings.storage)
    with session(settings, connection) as connection:
        whole: dict[int, JobSpec] = {}  # with whole ids of other jobs
        for spec in filter(lambda spec: spec.depends_on, _specs(checked)):
            whole[id(spec)] = replace(spec, depends_on=tuple(complete_ids(connection, spec.depends_on)))
            unfinished(connection, whole[id(spec)].depends_on)
        checked = [replace(each, spec=whole.get(id(each.spec), each.spec)) for each in checked]
        check_max_waiting(connection, entries_of(checked), settings.max_waiting)
        if dry_run:
            yield from foresee(connection, entries_of(checked))
            return
        if storage.folder is not None and storage.folder.is_relative_to(settings.home):
            with contextlib.suppress(OSError):  # the storage says why
                make_home(settings.home)
        of_video = {each.last_image or ANY_PHOTO for spec in _specs(requests) for each in spec.options} - {ANY_PHOTO}
        claim_storage(connection, storage)  # before anything is said
        if not all(map(storage.exists, of_video)):
            raise InputError(
                f"The last frame of that video was removed from the storage; give {spell('last_image')}.",
                field="last_image",
            )
        models = current_models(connection, settings)
        for note in _notes_on_models(settings, connection, models, _specs(requests)):
            observer.note(note)
        yield from submit_checked(connection, storage, models, checked, observer)


def submit_checked(
    connection: redis.Redis,
    storage: Storage,
    models: Mapping[str, str | None],
    checked: Sequence[PhotoRequest],
    observer: Observer | None = None,
) -> Iterator[Submission]:
    """Store checked photos, then enqueue their jobs, yielding each job as it is enqueued: the only way into the queues.

    The storage is claimed, and `models` are the `current_models`. Raises UnavailableError, and InputError if the id of
    a job is taken by a record that cannot be read.
    """
    observer = observer or Observer()
    observer.begin("storing", len(checked))
    photos = (each.photo for each in checked if each.photo is not None)
    for _ in ordered_map(partial(store, storage), photos, num_threads=storage.num_threads):
        observer.advance()
    observer.begin("enqueueing", sum(each.spec.num_jobs for each in checked))
    entries = entries_of(checked)
    have_order = any(each.spec.then or each.spec.depends_on for each in checked)
    enqueue = enqueue_chain if have_order else enqueue_many
    links = (each.spec.num_links for each in checked for _ in range(each.spec.num_jobs // each.spec.num_links))
    for size in links if have_order else repeat(CHUNK):
        if not (chunk := list(islice(entries, size))):
            break
        for submission in render_again(connection, storage, models, enqueue(connection, chunk)):
            observer.advance()
            yield submission


def _notes_on_models(
    settings: Settings, connection: redis.Redis, models: Mapping[str, str | None], specs: Iterable[JobSpec]
) -> Iterator[str]:
    specs = list(specs)
    if any(spec.is_open for spec in specs) and (sentence := why_default(settings, connection)):
        yield sentence
    named = {model_stem(each.model) for spec in specs for each in spec.options if each.model}
    for name in sorted(named - models.keys()) if models else ():
        yield f"No worker runs the model {name}; its videos wait for one."


def with_owner(spec: JobSpec, owner: str) -> JobSpec:
    """Return a spec whose jobs have an owner: the one that it names, else this one."""
    return spec if spec.owner or not owner else replace(spec, owner=owner)


def _look_up(
    settings: Settings, connection: redis.Redis | None, spell: Callable[[str], str]
) -> Callable[[JobSpec], JobSpec]:
    """Return a function that completes and checks a spec, which many photos share, by its owner and its LoRAs."""
    known = KnownLoras(settings, connection)
    done: dict[int, tuple[JobSpec, JobSpec]] = {}

    def look_up(spec: JobSpec) -> JobSpec:
        if id(spec) not in done:
            found = known.looked_up(with_owner(spec, settings.owner))
            found.check(spell)
            done[id(spec)] = (spec, found)
        return done[id(spec)][1]

    return look_up


def _specs(requests: Iterable[PhotoRequest | InputError]) -> Iterable[JobSpec]:
    """Return each spec once: many photos share one."""
    return {id(request.spec): request.spec for request in requests if isinstance(request, PhotoRequest)}.values()


def _with_family_of_prompts(requests: Sequence[PhotoRequest | InputError]) -> Sequence[PhotoRequest | InputError]:
    """Choose a family with prompts for videos whose family is open if one of their photos has a prompt."""
    model = published_model(WITH_PROMPTS[0])
    specs = {id(spec): replace(spec, model=model) for spec in _specs(requests) if spec.is_open}

    def is_open(request: PhotoRequest | InputError) -> TypeGuard[PhotoRequest]:
        return isinstance(request, PhotoRequest) and id(request.spec) in specs

    if not any(each.photo is None and usable_prompt(each.path) for each in filter(is_open, requests)):
        return requests
    return [replace(each, spec=specs[id(each.spec)]) if is_open(each) else each for each in requests]


def _check(
    max_pixels: int,
    requests: Sequence[PhotoRequest | InputError],
    skip_bad: bool,
    observer: Observer,
    spell: Callable[[str], str],
    look_up: Callable[[JobSpec], JobSpec],
) -> list[PhotoRequest]:
    for spec in _specs(request for request in requests if isinstance(request, PhotoRequest) and not request.where):
        look_up(spec)  # raises once for what is wrong with all photos
    paths = [request.path for request in requests if isinstance(request, PhotoRequest) and request.photo is None]
    files = (request.last for request in requests if isinstance(request, PhotoRequest))
    last_paths = list(dict.fromkeys(filter(None, files)))  # several photos may have the same one
    observer.begin("checking", len(paths) + len(last_paths))
    results = iter(check_photos(paths, max_pixels, observer.advance))
    lasts: dict[Path, Photo | InputError] = dict(
        zip(last_paths, check_photos(last_paths, max_pixels, observer.advance), strict=True)
    )
    prompts = PromptFiles(spell)
    checked, reasons = list[PhotoRequest](), list[InputError]()
    for request in requests:
        if isinstance(request, InputError):
            reasons.append(request)
            continue
        try:
            photo = request.photo or _checked(next(results), "image")
            last = _checked(lasts[request.last], "last_image") if request.last else photo.last
            spec = look_up(request.spec if request.photo else prompts.spec_for(request.spec, request.path))
        except InputError as error:
            reasons.append(InputError(f"{request.where}{error}", field=error.field))
        else:
            folder = "" if request.photo else request.path.absolute().parent.name
            source = request.source or source_path(folder, request.path.name)
            checked.append(replace(request, photo=replace(photo, source=source, last=last), spec=spec))
    if reasons and (not skip_bad or not checked):
        if len(requests) == 1:
            raise reasons[0]
        raise BadPhotosError([*map(str, reasons)], len(requests), spell("skip_bad"))
    for reason in reasons:
        observer.leave_out(str(reason))
    if prompts.num_without and len(checked) > 1:
        observer.note(
            f"{prompts.num_without:,} of {len(checked):,} photos have no prompt; write one into a .txt beside each, or "
            f"give {spell('prompt')}."
        )
    if prompts.num_ignored:
        observer.note(
            f"Prompts (.txt) that are ignored, because this family of models takes none: {prompts.num_ignored:,}; "
            f"give --family {' or '.join(WITH_PROMPTS)} if the workers' model takes them."
        )
    return checked


def _checked(result: Photo | InputError, field: str) -> Photo:
    if isinstance(result, InputError):
        raise InputError(str(result), field=field)
    return result


def claim_storage(connection: redis.Redis, storage: Storage) -> None:
    """Name this Redis in the marker of a storage, before photos are stored there.

    Raises UnavailableError if the marker is gone while jobs wait for their photos: the disk is not mounted, and what is
    written to the folder below it would be hidden by it, or take waiting workers for a storage without their photos.
    """
    if not storage.is_marked and connection.sismember(keys.STORAGES, storage.shown):
        waiting = sum(by_status[each] for by_status in counts(connection).values() for each in GOING)
        if waiting:
            raise UnavailableError(
                f"The storage {storage.shown!r} has lost its file {MARKER}, and {count(waiting, 'job')} in the queue "
                "may need the photos in it: mount its disk. If you have emptied it, `svdq cancel --all` first."
            )
    storage.claim(partial(database_id, connection))
    connection.sadd(keys.STORAGES, storage.shown)


def store(storage: Storage, photo: Photo) -> None:
    """Store a photo, and the photo of its last frame, unless the storage has it."""
    if not storage.has_input(photo.key, photo.num_bytes):
        with _BYTES.take(photo.num_bytes):
            storage.write_bytes(photo.key, photo.read())
    if photo.last is not None:
        store(storage, photo.last)


def entries_of(checked: Iterable[PhotoRequest]) -> Iterator[Entry]:
    """Make the jobs of checked photos."""
    index = 1
    for request in checked:
        assert request.photo is not None
        yield from request.spec.entries(request.photo, index)
        index += request.spec.num_jobs
