"""Removing what is old and of no more use: videos, photos that nothing refers to, checkpoints that nobody goes on with.

What belongs to a job that is still to be done is never touched. Redis knows those jobs; whoever shares a storage among
several Redis servers must not prune it, since each knows only its own.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import redis
import rq
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.producer.job import INPUT_KEY
from svdq.producer.queue import fetch
from svdq.producer.results.results import OUTPUTS, job_id_in, top_of
from svdq.producer.status.status import ENDED
from svdq.producer.storage.files import Entry
from svdq.producer.storage.storage import INPUT_AGE, Storage

INPUTS = "inputs"
CHECKPOINTS = "checkpoints"
#: Photos are kept for this long after they were submitted last, however young `--older-than` lets things be.
KEEP_INPUTS = 2 * INPUT_AGE
#: Files without the JSON beside them belong to a video in the making, of this Redis or another, for this long.
KEEP_UNFINISHED = timedelta(days=1)
#: Jobs read in one round trip.
AT_ONCE = 500

#: In JSON as it stands, which need not be parsed for this.
_INPUT_KEY = re.compile(INPUT_KEY.pattern.encode())


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Something to be removed: all files of a video, a photo, or the checkpoints of a job."""

    #: video, photo or checkpoint
    kind: str
    #: The job whose video or checkpoints they are; "" for a photo.
    job_id: str
    #: Where it is.
    storage: Storage
    #: What to remove, in this order: files or folders.
    keys: tuple[str, ...]
    #: One of its files as it was when it was found to be of no use.
    witness: Entry
    #: Bytes, and number of files.
    size: int
    num_files: int


@dataclass(frozen=True, kw_only=True)
class _Jobs:
    """What Redis knows."""

    #: Ids of jobs that are still to be done.
    unfinished: frozenset[str]
    #: Keys of the photos of all jobs, ended ones included: those may be retried.
    images: frozenset[str]


def find_removals(
    connection: redis.Redis, storage: Storage, home: Storage, older_than: timedelta, now: datetime
) -> list[Removal]:
    """Find what is older than that and of no more use; removes nothing.

    Args:
        connection: to the Redis whose jobs use the storage.
        storage: with photos, videos and perhaps checkpoints.
        home: SVDQ_HOME, where checkpoints lie unless they are in the storage.
        older_than: age of the newest file of a video, or of a photo's last submission.
        now: with a zone.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    cutoff = now - older_than
    outputs = list(storage.entries(OUTPUTS))
    inputs = [entry for entry in storage.entries(INPUTS) if entry.modified_at < min(cutoff, now - KEEP_INPUTS)]
    # Only now: what is submitted from here on has a photo that is too young to be in the list.
    jobs = _jobs(connection)
    removals = [removal for removal in _videos(storage, outputs, cutoff, now) if removal.job_id not in jobs.unfinished]
    gone = {removal.job_id for removal in removals}
    if inputs:
        used = jobs.images | _images_of(storage, [entry for entry in outputs if job_id_in(entry.key) not in gone])
        removals += [
            Removal(
                kind="photo",
                job_id="",
                storage=storage,
                keys=(entry.key,),
                witness=entry,
                size=entry.size,
                num_files=1,
            )
            for entry in inputs
            if entry.key not in used
        ]
    for place in {place.shown: place for place in (home, storage)}.values():
        removals += [removal for removal in _checkpoints(place, cutoff) if removal.job_id not in jobs.unfinished]
    return removals


def remove_all(connection: redis.Redis, removals: Sequence[Removal]) -> list[Removal]:
    """Remove what was found, but for what has come into use since; return what was removed.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    photos = [removal for removal in removals if removal.kind == "photo"]
    removed = [removal for removal in removals if removal.kind != "photo" and _remove(connection, removal)]
    if photos:
        # Looked up again: a video that was to go may have stayed, since its job was queued again.
        storage = photos[0].storage
        used = _images_of(storage, list(storage.entries(OUTPUTS))) | _jobs(connection).images
        removed += [photo for photo in photos if photo.witness.key not in used and _remove(connection, photo)]
    return removed


def _remove(connection: redis.Redis, removal: Removal) -> bool:
    if removal.job_id and _is_unfinished(connection, removal.job_id):
        return False
    if removal.storage.entry(removal.witness.key) != removal.witness:
        return False
    if removal.kind == "video" and not _forget(connection, removal.job_id):
        return False
    for key in removal.keys:
        removal.storage.remove(key)
    return True


def _videos(storage: Storage, entries: list[Entry], cutoff: datetime, now: datetime) -> Iterator[Removal]:
    """Find the files of each job all of which are old."""
    for job_id, ours in _by_job(entries).items():
        newest = max(ours, key=lambda entry: entry.modified_at)
        is_finished = any(_is_sidecar(entry) for entry in ours)
        if newest.modified_at < (cutoff if is_finished else min(cutoff, now - KEEP_UNFINISHED)):
            # The sidecar first: where it stands, the files are whole.
            tops = dict.fromkeys(top_of(entry.key) for entry in sorted(ours, key=lambda entry: not _is_sidecar(entry)))
            yield _removal("video", job_id, storage, tuple(tops), newest, ours)


def _checkpoints(storage: Storage, cutoff: datetime) -> Iterator[Removal]:
    """Find the checkpoints of each job that are old: checkpoints/<job>/<step>.safetensors."""
    by_job: dict[str, list[Entry]] = {}
    for entry in storage.entries(CHECKPOINTS):
        _, job_id, *rest = entry.key.split("/")
        if rest and not job_id.startswith("."):
            by_job.setdefault(job_id, []).append(entry)
    for job_id, ours in by_job.items():
        newest = max(ours, key=lambda entry: entry.modified_at)
        if newest.modified_at < cutoff:
            yield _removal("checkpoint", job_id, storage, (f"{CHECKPOINTS}/{job_id}",), newest, ours)


def _removal(
    kind: str, job_id: str, storage: Storage, keys: tuple[str, ...], newest: Entry, entries: list[Entry]
) -> Removal:
    return Removal(
        kind=kind,
        job_id=job_id,
        storage=storage,
        keys=keys,
        witness=newest,
        size=sum(entry.size for entry in entries),
        num_files=len(entries),
    )


def _by_job(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Sort files by the job whose id they carry; what carries none is not ours to remove."""
    by_job: dict[str, list[Entry]] = {}
    for entry in entries:
        job_id = job_id_in(entry.key)
        if job_id is not None:
            by_job.setdefault(job_id, []).append(entry)
    return by_job


def _is_sidecar(entry: Entry) -> bool:
    return entry.key.endswith(".json")


def _images_of(storage: Storage, entries: list[Entry]) -> frozenset[str]:
    """Find the photos that sidecars name, also those that other versions have written."""
    keys = [entry.key for entry in entries if _is_sidecar(entry)]
    return frozenset(image.decode() for _, data in storage.read_many(keys) for image in _INPUT_KEY.findall(data))


def _jobs(connection: redis.Redis) -> _Jobs:
    """Read all jobs there are, whatever queue or registry they are on their way to."""
    unfinished: set[str] = set()
    images: set[bytes] = set()
    some: list[str] = []

    def read() -> None:
        for job in rq.job.Job.fetch_many(some, connection=connection, serializer=JSONSerializer):
            if job is not None:
                images.update(_INPUT_KEY.findall(job.data))
                if job.get_status(refresh=False) not in ENDED:  # RQ's states are strings
                    unfinished.add(job.id)
        some.clear()

    prefix = rq.job.Job.redis_job_namespace_prefix
    for key in connection.scan_iter(match=f"{prefix}*", count=AT_ONCE):
        job_id = as_text(key).removeprefix(prefix)
        if ":" not in job_id:  # else what RQ keeps beside a job
            some.append(job_id)
        if len(some) >= AT_ONCE:
            read()
    read()
    return _Jobs(unfinished=frozenset(unfinished), images=frozenset(image.decode() for image in images))


def _is_unfinished(connection: redis.Redis, job_id: str) -> bool:
    status = connection.hget(rq.job.Job.key_for(job_id), "status")
    return status is not None and as_text(status) not in ENDED


def _forget(connection: redis.Redis, job_id: str) -> bool:
    """Have Redis forget a finished job whose files go, so that the same submission renders anew.

    Returns False when the job has just been queued again.
    """
    key = rq.job.Job.key_for(job_id)
    if not connection.exists(key):
        return True
    job = fetch(connection, job_id)
    with connection.pipeline() as pipeline:
        pipeline.watch(key)  # type: ignore[no-untyped-call]
        status = as_text(connection.hget(key, "status") or b"")
        if status != JobStatus.FINISHED.value:
            return status in ENDED
        pipeline.multi()
        job.delete(pipeline=pipeline)
        try:
            pipeline.execute()
        except redis.WatchError:
            return False
    return True
