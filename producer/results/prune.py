"""Removes old files that are no longer needed: videos, unreferenced photos and unused checkpoints.

Files of unfinished jobs, and videos that a person has marked to keep, are never removed. Only Redis has the list of
those jobs, so a storage that several Redis servers share must not be pruned: each of them has only its own jobs.
"""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import PurePosixPath

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.chains import later_links
from svdq.producer.job import INPUT_KEY, Job, last_frame_beside, latents_key, parse_job
from svdq.producer.job_control import cancel
from svdq.producer.queue import ENDED, database_id, fetch, fetch_many, is_ours, no_such_job, read_job, statuses
from svdq.producer.results.finished_videos import ID, OUTPUTS, Result, ids_of_sidecars, read_results
from svdq.producer.status.registries import scan_ids
from svdq.producer.storage.local import FileInfo
from svdq.producer.storage.storage import CHECKPOINTS, INPUT_AGE, MARKER, Storage, is_checkpoint_folder
from svdq.producer.untrusted_job import UnreadableJobError, key_of, read_many

_INPUT_KEY = re.compile(INPUT_KEY.pattern.encode())  # keys of photos in JSON text, found without parsing it
_LATENTS = re.compile(rf"latents/({ID})\.safetensors")  # of no other names, which svdq may not have made


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Files to remove together: all files of a video, a photo, or the checkpoints of a job."""

    kind: str  # video, photo or checkpoint
    job_id: str  # of the video or checkpoints; "" for a photo
    storage: Storage
    keys: tuple[str, ...]  # removed in this order
    witness: FileInfo  # one of its files as it was when it was found to be unused
    size: int  # in bytes
    num_files: int


def find_removals(
    connection: redis.Redis,
    storage: Storage,
    home: Storage,
    older_than: timedelta,
    now: datetime,
    on_bad: Callable[[str], None] = lambda reason: None,
) -> list[Removal]:
    """Find old files that are no longer needed; removes nothing.

    `older_than` is the minimum age of the newest file of a video, and of a photo's last submission. Checkpoints are in
    `storage` or in `home`, SVDQ_HOME. `on_bad` is called with a sentence for each sidecar or job that cannot be read;
    its files are kept. Raises InputError if svdq has never written to the storage, or another Redis has its jobs.
    """
    cutoff = now - older_than
    outputs = list(storage.entries(OUTPUTS))
    # Photos are kept longer than the storage trusts their last submission, even if `older_than` is shorter.
    inputs = [
        entry
        for entry in storage.entries("inputs")
        if entry.modified_at < min(cutoff, now - 2 * INPUT_AGE) and INPUT_KEY.fullmatch(last_frame_beside(entry.key))
    ]
    # Read after the photos: later submissions have photos that are too young to be in the list.
    unfinished, images = _read_jobs(connection, on_bad)
    results = list(read_results(storage, outputs, lambda sidecar: sidecar.modified_at < cutoff, on_bad))
    in_use = unfinished | job_control.marked(connection, "keep")
    latents = {entry.key: entry for entry in storage.entries("latents")}
    removals = [each for each in _videos(storage, outputs, latents, results, cutoff) if each.job_id not in in_use]
    needed = unfinished.union(ids_of_sidecars(outputs))
    removals += [
        _removal("checkpoint", found[1], storage, (key,), [entry])
        for key, entry in latents.items()
        if entry.modified_at < cutoff and (found := _LATENTS.fullmatch(key)) and found[1] not in needed
    ]
    gone = {key for removal in removals for key in removal.keys}
    if inputs:
        used = images | _images_of(storage, [entry for entry in outputs if entry.key not in gone])
        unused = [entry for entry in inputs if last_frame_beside(entry.key) not in used]
        removals += [_removal("photo", "", storage, (entry.key,), [entry]) for entry in unused]
    for place in {place.shown: place for place in (home, storage)}.values():
        removals += [removal for removal in _checkpoints(place, cutoff) if removal.job_id not in unfinished]
    if not any(removal.storage is storage for removal in removals):
        return removals
    if not storage.is_marked:
        raise InputError(
            f"svdq has never written to {storage.shown!r}: there is no file {MARKER} in it. Check SVDQ_STORAGE; if it "
            "is the storage of an earlier version, create an empty file of that name there."
        )
    if storage.database_id not in (None, database_id(connection)):
        raise InputError(
            f"The jobs of {storage.shown!r} are in another Redis, which alone knows what is needed: check "
            f"SVDQ_REDIS_URL. If that Redis is lost, remove the line `redis: …` from {storage.location(MARKER)!r}."
        )
    return removals


def remove_all(connection: redis.Redis, removals: Sequence[Removal]) -> list[Removal]:
    """Remove what was found unless it is in use again; return what was removed."""
    photos = [removal for removal in removals if removal.kind == "photo"]
    # Asked again: a person may have thought about it while another link was submitted.
    needed = _continued(connection, [removal.job_id for removal in removals if removal.kind == "video"])
    others = [removal for removal in removals if removal.kind != "photo" and removal.job_id not in needed]
    removed = [removal for removal in others if _remove(connection, removal)]
    if photos:
        # Checked again: a video may have been kept because its job was queued again.
        storage = photos[0].storage
        _, images = _read_jobs(connection, lambda reason: None)
        used = images | _images_of(storage, list(storage.entries(OUTPUTS)))
        unused = [photo for photo in photos if last_frame_beside(photo.witness.key) not in used]
        removed += [photo for photo in unused if _remove(connection, photo)]
    return removed


def _continued(connection: redis.Redis, job_ids: Sequence[str]) -> set[str]:
    """Return the jobs whose video another job continues that has none yet."""
    later = later_links(connection, job_ids)
    found = zip(later.values(), statuses(connection, list(later)), strict=True)
    return {origin for origin, status in found if status not in (None, JobStatus.FINISHED.value)}


def _remove(connection: redis.Redis, removal: Removal) -> bool:
    if removal.job_id:
        (status,) = statuses(connection, [removal.job_id])
        if status is not None and status not in ENDED:
            return False
    if removal.storage.entry(removal.witness.key) != removal.witness:
        return False
    if removal.kind == "video":
        try:
            if not forget(connection, removal.job_id, only=(JobStatus.FINISHED.value,)):
                return False
        except InputError:
            return False  # its record cannot be read
    for key in removal.keys:
        removal.storage.remove(key)
    if removal.kind == "video":
        job_control.give(connection, [removal.job_id], None)
    return True


def _videos(
    storage: Storage,
    entries: list[FileInfo],
    latents: Mapping[str, FileInfo],
    results: list[Result],
    cutoff: datetime,
) -> Iterator[Removal]:
    num_files = Counter(
        str(folder) for entry in entries for folder in PurePosixPath(entry.key).parents if str(folder) != "."
    )
    for result in results:
        files = [result.sidecar, *result.files]
        if max(entry.modified_at for entry in files) < cutoff:
            # The sidecar is removed first: its presence means that the files are complete.
            keys = [result.sidecar.key]
            for output in result.outputs:
                frames = [entry.key for entry in result.files if entry.key.startswith(f"{output}/")]
                # A folder of frames is removed as a whole, unless the user has added files.
                keys += frames if len(frames) < num_files[output] else [output]
            if kept := latents.get(latents_key(result.job_id)):
                keys, files = [*keys, kept.key], [*files, kept]
            yield _removal("video", result.job_id, storage, tuple(keys), files)


def _checkpoints(storage: Storage, cutoff: datetime) -> Iterator[Removal]:
    by_job: dict[str, list[FileInfo]] = defaultdict(list)
    for entry in storage.entries(CHECKPOINTS):
        _, job_id, *rest = entry.key.split("/")
        if rest:
            by_job[job_id].append(entry)
    for job_id, ours in by_job.items():
        folder = f"{CHECKPOINTS}/{job_id}"
        names = {entry.key.removeprefix(f"{folder}/") for entry in ours}
        if is_checkpoint_folder(job_id, names) and max(entry.modified_at for entry in ours) < cutoff:
            yield _removal("checkpoint", job_id, storage, (folder,), ours)


def _removal(kind: str, job_id: str, storage: Storage, keys: tuple[str, ...], entries: list[FileInfo]) -> Removal:
    return Removal(
        kind=kind,
        job_id=job_id,
        storage=storage,
        keys=keys,
        witness=max(entries, key=lambda entry: entry.modified_at),
        size=sum(entry.size for entry in entries),
        num_files=len(entries),
    )


def _images_of(storage: Storage, entries: list[FileInfo]) -> set[str]:
    """Return the photos that sidecars refer to, including sidecars of other versions and unreadable ones."""
    keys = [entry.key for entry in entries if entry.key.endswith(".json")]
    return {image for _, data in storage.read_many(keys) for image in map(bytes.decode, _INPUT_KEY.findall(data))}


def _read_jobs(connection: redis.Redis, on_bad: Callable[[str], None]) -> tuple[set[str], set[str]]:
    """Return the ids of unfinished and unreadable jobs, and the keys of the photos of all, which may be retried.

    A job counts as unfinished while another one may continue its chain, which begins with its file, or upscale it.
    """
    unfinished: set[str] = set()
    images: set[str] = set()
    for found in read_many(connection, scan_ids(connection)):
        if isinstance(found, UnreadableJobError):
            on_bad(f"{found} It is left out.")
            unfinished.add(found.job_id)
        elif found is not None:
            images.update(map(bytes.decode, _INPUT_KEY.findall(found.data)))
            status = found.get_status(refresh=False)
            if status.value not in ENDED:
                unfinished.add(found.id)
            if status is not JobStatus.FINISHED and (job := read_job(found)):
                unfinished |= {job.predecessor, job.finishes.rpartition("-")[2]}
    return unfinished, images


def check_unneeded(connection: redis.Redis, job_ids: Sequence[str]) -> None:
    """Raise InputError if one of these jobs has not ended, is to be kept, or another one continues its video."""
    found = statuses(connection, job_ids)
    marks = job_control.read(connection, job_ids)
    for job_id, status, mark in zip(job_ids, found, marks, strict=True):
        if status is not None and status not in ENDED:
            raise InputError(f"Job {job_id!r} is {status}: `svdq cancel {job_id}` it first.")
        if mark == "keep":
            raise InputError(f"The video of job {job_id!r} is to be kept: `svdq mark none {job_id}` it first.")
    later = {job_id: origin for job_id, origin in later_links(connection, job_ids).items() if job_id not in job_ids}
    for (job_id, origin), status in zip(later.items(), statuses(connection, list(later)), strict=True):
        if status in job_control.GOING:
            raise InputError(f"Job {job_id!r} continues the video of {origin!r}: `svdq cancel {job_id}` it first.")


def remove_video(connection: redis.Redis, storage: Storage, result: Result) -> None:
    """Remove the files and the verdict of a video whose job Redis has forgotten; files that svdq did not make stay.

    Raises InputError if its sidecar is of another version.
    """
    try:
        job = parse_job(result.document.job)
    except ValueError as error:
        where = storage.location(result.sidecar.key)
        raise InputError(f"{where!r} is of another version of svdq; remove it and the files beside it.") from error
    keys = video_files(storage, job, result.job_id)
    for key in (result.sidecar.key, *keys):  # the sidecar first: its presence means that the files are complete
        storage.remove(key)
    job_control.give(connection, [result.job_id], None)


def remove_job(connection: redis.Redis, storage: Storage, home: Storage, job_id: str) -> bool:
    """Cancel a job that has not ended; remove the record, the verdict, the files and checkpoints of one that has.

    Its photo and files that svdq has not made stay. Checkpoints are in `storage` or in `home`, SVDQ_HOME. Returns False
    if it is in flight: it can be removed after its current step. Raises InputError if there is no such job, or its
    record cannot be read.
    """
    while True:
        rq_job = fetch(connection, job_id)
        if not is_ours(rq_job):
            raise no_such_job(job_id)
        if rq_job.get_status(refresh=False).value not in ENDED:
            with contextlib.suppress(InputError):  # it has just ended
                if cancel(connection, job_id) == "stopping":
                    return False
            continue
        job = read_job(rq_job)
        files = video_files(storage, job, job_id) if job else []
        if job:
            storage.remove(job.sidecar_key(job_id))  # first: its presence means that the files are complete
        # The record before the files: a new job of the same id may write its own.
        if forget(connection, job_id):
            for key in files:
                storage.remove(key)
            for place in (storage, home):
                place.remove_checkpoints(job_id)
            job_control.give(connection, [job_id], None)
            return True


def video_files(storage: Storage, job: Job, job_id: str) -> list[str]:
    """Return the keys of the files of a finished job, besides its sidecar and what svdq has not made."""
    stem = job.output_stem(job_id)
    files = [latents_key(job_id), *(f"{stem}.{kind}" for kind in job.formats if kind != "png")]
    if "png" in job.formats:
        entries = list(storage.entries(stem))
        frames = [entry.key for entry in entries if entry.key.rpartition("/")[2].startswith("frame_")]
        # A folder of frames is removed as a whole, unless somebody has added files.
        files += frames if len(frames) < len(entries) else [stem]
    return files


def forget(connection: redis.Redis, job_id: str, only: Collection[str] = ENDED) -> bool:
    """Delete the record of an ended job, so that the same submission renders again; raises InputError.

    Nothing is done if there is no record, or if the job ended in a status that is not in `only`. Returns False if the
    job has not ended, such as when it has just been queued again.
    """
    with connection.pipeline() as pipeline:
        pipeline.watch(key_of(job_id))  # type: ignore[no-untyped-call]
        (job,) = fetch_many(connection, [job_id])
        if job is None:
            return True
        status = job.get_status(refresh=False).value
        if status not in ENDED:
            return False
        if status not in only:
            return True
        if status == JobStatus.CANCELED.value and connection.scard(job.dependents_key):
            return True  # jobs wait for it, until it is retried or they are canceled
        pipeline.multi()
        job.delete(pipeline=pipeline)
        try:
            pipeline.execute()
        except redis.WatchError:
            return False
    return True
