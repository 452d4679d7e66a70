"""Removes old files that are no longer needed: videos, unreferenced photos and unused checkpoints.

Files of unfinished jobs, videos that a person has marked to keep, and what people have moved or copied to other folders
are never removed. Only Redis has the list of those jobs, so a storage that several Redis servers share must not be
pruned: each of them has only its own jobs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import PurePosixPath

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.producer.connection import CLOCKS_S, clock_of, database_id
from svdq.producer.job import ID, INPUT_KEY, last_frame_beside, latents_key
from svdq.producer.queue import ENDED, read_job, statuses
from svdq.producer.results.finished_videos import OUTPUTS, Result, ids_of_sidecars, read_results
from svdq.producer.results.holders import being_removed, forget_marks, is_needed, kept
from svdq.producer.results.remove import forget
from svdq.producer.status.registries import scan_ids
from svdq.producer.storage.local import FileInfo
from svdq.producer.storage.storage import CHECKPOINTS, INPUT_AGE, MARKER, Storage, is_checkpoint_folder
from svdq.producer.text import duration
from svdq.producer.untrusted_job import UnreadableJobError, read_many

_INPUT_KEY = re.compile(INPUT_KEY.pattern.encode())  # keys of photos in JSON text, found without parsing it
_LATENTS = re.compile(rf"latents/({ID})\.safetensors")  # of no other names, which svdq may not have made


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Files to remove together: all files of a video, a photo, or the checkpoints of a job."""

    kind: str  # video, photo or checkpoint
    job_id: str  # of the video or checkpoints; "" for a photo
    storage: Storage
    keys: tuple[str, ...]  # removed in this order
    original: str = ""  # the id of the video that it is an upscaled copy of
    witness: FileInfo  # one of its files as it was when it was found to be unused
    size: int  # in bytes
    num_files: int


def check_clock(connection: redis.Redis) -> datetime:
    """Return the time of Redis' clock; raises InputError if ours differs, since then no age of a file is certain."""
    now = clock_of(connection)
    apart_s = (datetime.now().astimezone() - now).total_seconds()
    if abs(apart_s) > CLOCKS_S:
        raise InputError(
            f"The clock of this machine is {duration(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} the "
            "clock of Redis, so it is not certain how old files are; set the clocks right first."
        )
    return now


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
    in_use = unfinished.union(kept(connection, {result.job_id: result.original for result in results}))
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
    removed = [removal for removal in removals if removal.kind != "photo" and _remove(connection, removal)]
    if photos:
        # Checked again: a video may have been kept because its job was queued again.
        storage = photos[0].storage
        _, images = _read_jobs(connection, lambda reason: None)
        used = images | _images_of(storage, list(storage.entries(OUTPUTS)))
        unused = [photo for photo in photos if last_frame_beside(photo.witness.key) not in used]
        removed += [photo for photo in unused if _remove(connection, photo)]
    return removed


def _remove(connection: redis.Redis, removal: Removal) -> bool:
    if removal.kind == "video":
        # Asked again: a person may have thought about it while another link or an upscaled copy was submitted.
        with being_removed(connection, removal.job_id):
            return not is_needed(connection, removal.job_id, removal.original) and _remove_video(connection, removal)
    if removal.job_id:
        (status,) = statuses(connection, [removal.job_id])
        if status is not None and status not in ENDED:
            return False
    return _remove_files(removal)


def _remove_video(connection: redis.Redis, removal: Removal) -> bool:
    if removal.storage.entry(removal.witness.key) != removal.witness:
        return False
    try:
        if not forget(connection, removal.job_id, only=(JobStatus.FINISHED.value,)):
            return False
    except InputError:
        return False  # its record cannot be read
    _remove_files(removal)
    forget_marks(connection, [removal.job_id])
    return True


def _remove_files(removal: Removal) -> bool:
    if removal.storage.entry(removal.witness.key) != removal.witness:
        return False
    for key in removal.keys:
        removal.storage.remove(key)
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
        if result.is_in_its_folder and max(entry.modified_at for entry in files) < cutoff:
            # The sidecar is removed first: its presence means that the files are complete.
            keys = [result.sidecar.key]
            for output in result.outputs:
                frames = [entry.key for entry in result.files if entry.key.startswith(f"{output}/")]
                # A folder of frames is removed as a whole, unless the user has added files.
                keys += frames if len(frames) < num_files[output] else [output]
            if kept := latents.get(latents_key(result.job_id)):
                keys, files = [*keys, kept.key], [*files, kept]
            yield replace(_removal("video", result.job_id, storage, tuple(keys), files), original=result.original)


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
                unfinished |= {job.predecessor, job.original}
    return unfinished, images
