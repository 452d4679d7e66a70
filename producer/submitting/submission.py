"""Submits photos: checks all of them, then stores them, then enqueues their jobs."""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.known_model import NOT_KNOWN
from svdq.pipeline.models.model_name import model_stem
from svdq.producer import keys
from svdq.producer.connection import connect, database_id, session
from svdq.producer.files import make_home
from svdq.producer.job_control import GOING, unfinished
from svdq.producer.settings import Settings
from svdq.producer.status.registries import counts
from svdq.producer.status.running import read_running
from svdq.producer.status.selection import complete_ids
from svdq.producer.storage.storage import MARKER, Storage
from svdq.producer.submitting.checking import Observer, check_requests, specs_of, with_family_of_prompts
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import CHUNK, enqueue_chain, enqueue_many
from svdq.producer.submitting.entries import Entry, Submission
from svdq.producer.submitting.foresight import check_max_waiting, foresee
from svdq.producer.submitting.job_spec import ANY_PHOTO, JobSpec
from svdq.producer.submitting.model_choice import current_models, expect, render_again, why_default
from svdq.producer.submitting.parameters import as_flag
from svdq.producer.submitting.photo_requests import requests_for
from svdq.producer.submitting.photos import Photo
from svdq.producer.submitting.sources import PhotoRequest, find_photos
from svdq.producer.text import count, in_zone
from svdq.producer.threads import Budget, ordered_map

_BYTES = Budget(1 << 25)  # bytes of photos that are held in memory to be stored


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
        drafts=(options,),
        expected=expect(settings, named=options.model),
        priority=priority,
        at=None if at is None else in_zone(at),
        then=(then,) if isinstance(then, str) else tuple(then),
        force=force,
        owner=settings.owner,
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
    requests = with_family_of_prompts(requests)
    for spec in specs_of(requests):
        spec.check(spell)
    if connection is not None:
        connection.ping()
    elif settings.redis_url:
        connect(settings).close()  # fails before thousands of photos are checked; changes nothing
    checked = check_requests(settings, requests, connection, skip_bad=skip_bad, observer=observer, spell=spell)
    storage = storage or Storage.open_for_command(settings.storage)
    with session(settings, connection) as connection:
        whole: dict[int, JobSpec] = {}  # with whole ids of other jobs
        for spec in filter(lambda spec: spec.depends_on, specs_of(checked)):
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
        of_video = {each.last_image or ANY_PHOTO for spec in specs_of(requests) for each in spec.drafts} - {ANY_PHOTO}
        claim_storage(connection, storage)  # before anything is said
        if not all(map(storage.exists, of_video)):
            raise InputError(
                f"The last frame of that video was removed from the storage; give {spell('last_image')}.",
                field="last_image",
            )
        for note in _notes_on_models(settings, connection, specs_of(requests)):
            observer.note(note)
        with forced_once(connection, checked) as new:
            yield from submit_checked(connection, storage, settings, new, observer)


@contextlib.contextmanager
def forced_once(
    connection: redis.Redis, requests: Sequence[PhotoRequest], dry_run: bool = False
) -> Iterator[Sequence[PhotoRequest]]:
    """Yield requests for new jobs, where they are forced: those of the same submission, if that was cut off."""
    specs = {id(spec): spec for spec in specs_of(requests)}
    if dry_run or not any(spec.force for spec in specs.values()):
        yield requests
        return
    # How the jobs are queued, and what workers run, may be different now.
    same = {each: repr(replace(spec, at=None, expected=NOT_KNOWN, priority="")) for each, spec in specs.items()}
    digest = hashlib.sha256()
    for each in requests:
        which = each.photo.key if each.photo else each.result.job_id if each.result else ""
        digest.update(f"{which} {same[id(each.spec)]}".encode())
    key = f"{keys.FORCED}{digest.hexdigest()}"
    connection.set(key, secrets.token_hex(8), nx=True, ex=keys.DAY_S)
    nonce = str(connection.get(key), "ascii")  # type: ignore[arg-type]
    new = {each: replace(spec, request_key=nonce) for each, spec in specs.items()}
    yield [replace(each, spec=new[id(each.spec)]) for each in requests]
    connection.delete(key)


def submit_checked(
    connection: redis.Redis,
    storage: Storage,
    settings: Settings,
    checked: Sequence[PhotoRequest],
    observer: Observer | None = None,
) -> Iterator[Submission]:
    """Store checked photos, then enqueue their jobs, yielding each job as it is enqueued: the only way into the queues.

    The storage is claimed. Raises UnavailableError, and InputError if the id of a job is taken by a record that cannot
    be read.
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
        for submission in render_again(connection, storage, enqueue(connection, chunk), settings):
            observer.advance()
            yield submission


def _notes_on_models(settings: Settings, connection: redis.Redis, specs: Iterable[JobSpec]) -> Iterator[str]:
    specs = list(specs)
    named = {model_stem(each.model) for spec in specs for each in spec.drafts if each.model}
    models = current_models(settings, read_running(connection).models) if named else {}
    yield from filter(None, {why_default(spec.expected) for spec in specs if spec.is_open})
    for name in sorted(named - models.keys()) if models else ():
        yield f"No worker runs the model {name}; its videos wait for one."


def claim_storage(connection: redis.Redis, storage: Storage) -> None:
    """Name this Redis in the marker of a storage, before photos are stored there.

    Raises UnavailableError if the marker is gone while jobs wait for their photos: the disk is not mounted, and what is
    written to the folder below it would be hidden by it, or take waiting workers for a storage without their photos.
    """
    if not storage.is_marked and connection.sismember(keys.STORAGES, storage.shown):
        found = counts(connection).values()
        waiting = sum(number for by_status in found for status, number in by_status.items() if status in GOING)
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
