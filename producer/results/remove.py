"""Removes single videos with their files, and the records of jobs that have ended."""

import contextlib
from collections.abc import Collection, Iterable, Sequence

import redis
from rq.job import JobStatus

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job, latents_key, parse_job
from svdq.producer.job_control import GOING, cancel
from svdq.producer.outbox import tell
from svdq.producer.queue import ENDED, fetch, fetch_many, is_ours, no_such_job, read_job
from svdq.producer.results.finished_videos import Result, by_place, results_of_job
from svdq.producer.results.holders import being_removed, check_not_kept, check_unneeded, forget_marks
from svdq.producer.storage.storage import Storage
from svdq.producer.untrusted_job import key_of


def check_removable(connection: redis.Redis, job_ids: Sequence[str], results: Iterable[Result] = ()) -> None:
    """Raise InputError as `holders.check_unneeded`; `results` are videos of jobs that Redis may have forgotten."""
    originals = {result.job_id: result.original for result in results}
    for job_id, found in zip(job_ids, fetch_many(connection, job_ids), strict=True):
        job = read_job(found) if found else None
        originals[job_id] = job.original if job else originals.get(job_id, "")
    check_unneeded(connection, originals)


def remove_video(connection: redis.Redis, storage: Storage, results: Sequence[Result]) -> None:
    """Remove the files and the verdict of a video whose job Redis has forgotten; files that svdq did not make stay.

    `results` are all its places, of which only one is removed: others are people's copies. Raises InputError if its
    sidecar is of another version, and as `holders.check_unneeded`.
    """
    result = min(results, key=by_place)
    try:
        parse_job(result.document.job)
    except ValueError as error:
        where = storage.location(result.sidecar.key)
        raise InputError(f"{where!r} is of another version of svdq; remove it and the files beside it.") from error
    with being_removed(connection, result.job_id):
        check_unneeded(connection, {result.job_id: result.original})
        tell(connection, "video.deleted", result.job_id)
        for key in _keys(storage, result):
            storage.remove(key)
        forget_marks(connection, [result.job_id])


def remove_job(connection: redis.Redis, storage: Storage, home: Storage, job_id: str) -> bool:
    """Cancel a job that has not ended; remove the record, the verdict, the files and checkpoints of one that has.

    Its photo, people's copies and files that svdq has not made stay. Checkpoints are in `storage` or in `home`,
    SVDQ_HOME. Returns False if it is in flight: it can be removed after its current step. Raises InputError if there is
    no such job, its record cannot be read, or the video is needed.
    """
    while True:
        rq_job = fetch(connection, job_id)
        if not is_ours(rq_job):
            raise no_such_job(job_id)
        job = read_job(rq_job)
        originals = {job_id: job.original if job else ""}
        if rq_job.get_status(refresh=False).value in GOING:
            check_not_kept(connection, originals)
            with contextlib.suppress(InputError):  # it has just ended
                if cancel(connection, job_id) == "stopping":
                    return False
            continue
        with being_removed(connection, job_id):
            check_unneeded(connection, originals)
            sidecar, *files = _keys_of_job(storage, job, job_id) if job else [""]
            if sidecar:
                storage.remove(sidecar)  # first: its presence means that the files are complete
            # The record before the files: a new job of the same id may write its own.
            if forget(connection, job_id):
                for key in files:
                    storage.remove(key)
                for place in (storage, home):
                    place.remove_checkpoints(job_id)
                forget_marks(connection, [job_id])
                return True


def _keys_of_job(storage: Storage, job: Job, job_id: str) -> list[str]:
    """Return the keys of the sidecar and the files of a job, also in a folder that somebody has renamed."""
    sidecar, outputs = job.sidecar_key(job_id), list(job.output_keys(job_id).values())
    if not any(map(storage.exists, (sidecar, *outputs))) and (moved := results_of_job(storage, job_id)):
        return _keys(storage, moved[0])
    return _with_files(storage, job_id, sidecar, outputs)


def _keys(storage: Storage, result: Result) -> list[str]:
    return _with_files(storage, result.job_id, result.sidecar.key, result.outputs)


def _with_files(storage: Storage, job_id: str, sidecar: str, outputs: Iterable[str]) -> list[str]:
    """Return the keys of a sidecar and of the files of its video, without what svdq has not made."""
    files = [sidecar, latents_key(job_id)]
    for output in outputs:
        if f"{output}.json" != sidecar:  # else it is a folder of frames
            files.append(output)
            continue
        entries = [entry.key for entry in storage.entries(output)]
        frames = [key for key in entries if key.rpartition("/")[2].startswith("frame_")]
        # A folder of frames is removed as a whole, unless somebody has added files.
        files += frames if len(frames) < len(entries) else [output]
    return files


def forget(connection: redis.Redis, job_id: str, only: Collection[str] = ENDED) -> bool:
    """Delete the record of an ended job, so that the same submission renders again; raises InputError.

    Nothing is done if there is no record, or if the job ended in a status that is not in `only`. Returns False if the
    job waits or is in flight, such as when it has just been queued again. A job that was never queued counts as ended.
    """
    with connection.pipeline() as pipeline:
        pipeline.watch(key_of(job_id))  # type: ignore[no-untyped-call]
        (job,) = fetch_many(connection, [job_id])
        if job is None:
            tell(connection, "video.deleted", job_id)
            return True
        status = job.get_status(refresh=False).value
        if status in GOING or (status not in ENDED and only != ENDED):
            return False
        if status in ENDED and status not in only:
            return True
        if status == JobStatus.CANCELED.value and connection.scard(job.dependents_key):
            return True  # jobs wait for it, until it is retried or they are canceled
        pipeline.multi()
        job.delete(pipeline=pipeline)
        tell(pipeline, "video.deleted", job_id)
        try:
            pipeline.execute()
        except redis.WatchError:
            return False
    return True
