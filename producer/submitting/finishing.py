"""Submits jobs that upscale finished videos, without denoising them again."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.image import open_photo
from svdq.producer import job_control
from svdq.producer.job import Job, latents_key, parse_job
from svdq.producer.queue import fetch_many, read_arguments, session
from svdq.producer.records import LINK_NOTE, REPLACED_NOTE, SOURCE_NOTE, TAKEN_NOTE
from svdq.producer.results.fetch import results_of
from svdq.producer.results.finished_videos import OUTPUTS, Result, find_results
from svdq.producer.results.holders import record_copies
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import Entry, enqueue_many
from svdq.producer.submitting.foresight import check_max_waiting
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import render_again
from svdq.producer.submitting.submission import Observer, Submission, claim_storage, foresee, submission_of


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishRequest:
    """A finished video, and how it is to be upscaled."""

    result: Result
    spec: JobSpec


def finish_requests(
    settings: Settings, spec: JobSpec, job_ids: Sequence[str], *, kept: bool = False
) -> list[FinishRequest]:
    """Ask for the videos of jobs, by prefixes of their ids, or for those that are marked to keep, to be upscaled.

    Raises InputError unless `spec` says how to upscale and nothing else about the video, as `results_of`, and where
    there is none.
    """
    plain = JobSpec(
        options=(Draft(upscale=spec.options[0].upscale),),
        **{name: getattr(spec, name) for name in ("model", "priority", "name", "folder", "at", "force", "owner")},
    )
    if not spec.options[0].upscale or spec != plain:
        raise InputError(
            "--finish needs --upscale, such as --upscale 2, and takes no other parameter of the video; besides it, "
            "--output, --name, --priority, --at and --force."
        )
    spec.check()
    if bool(job_ids) == kept:
        raise InputError("Give either IDs of finished videos, or --kept for all that are marked to keep.")
    storage = Storage.open_for_command(settings.storage)
    if kept:
        with session(settings) as connection:
            ids = job_control.marked(connection, "keep")
        results = sorted(find_results(storage, job_ids=ids), key=lambda result: result.finished_at) if ids else []
        if not results:
            raise InputError("No finished video is marked to keep; mark some with `svdq mark keep ID`, or on the page.")
    else:
        results = results_of(settings, storage, job_ids)
    return [FinishRequest(result=result, spec=spec) for result in results]


def submit_finishing(
    settings: Settings,
    requests: Sequence[FinishRequest],
    *,
    skip_bad: bool = False,
    dry_run: bool = False,
    observer: Observer | None = None,
    connection: redis.Redis | None = None,
    storage: Storage | None = None,
) -> Iterator[Submission]:
    """Enqueue a job for each finished video, and yield it; all are checked before. Otherwise as `submit_all`."""
    observer, storage = observer or Observer(), storage or Storage.open_for_command(settings.storage)
    with session(settings, connection) as connection:
        entries: dict[str, Entry] = {}
        made: dict[str, FinishRequest] = {}
        for index, request in enumerate(requests, 1):
            try:
                entry = _entry(settings, connection, storage, request, index)
            except InputError as error:
                if not skip_bad:
                    raise
                observer.leave_out(str(error))
            else:
                entries.setdefault(entry.job_id, entry)
                made.setdefault(entry.job_id, request)
        check_max_waiting(connection, entries.values(), settings.max_waiting)
        if dry_run:
            yield from foresee(connection, entries.values())
            return
        claim_storage(connection, storage)
        copies = {each: request.result.job_id for each, request in made.items()}
        record_copies(
            connection, {each: origin for each, origin in copies.items() if origin != entries[each].job.original}
        )
        enqueued = enqueue_many(connection, list(entries.values()))
        again = render_again(connection, storage, {}, enqueued)
        for entry, each in zip(entries.values(), enqueued, strict=True):
            yield submission_of(entry, each, again.get(entry.job_id, ""))


def _entry(settings: Settings, connection: redis.Redis, storage: Storage, request: FinishRequest, index: int) -> Entry:
    result, spec = request.result, request.spec
    where = storage.location(result.sidecar.key)
    try:
        made = parse_job(result.document.job)
    except ValueError as error:
        raise InputError(f"{where!r} is of another version of svdq; submit its photo with --upscale.") from error
    if "mp4" not in made.formats and not storage.exists(latents_key(result.job_id)):
        raise InputError(
            f"The video {made.name!r} ({result.job_id}) has neither an mp4 nor kept latents; submit its photo with "
            f"--like {where!r} --upscale {spec.options[0].upscale}."
        )
    # Of a video that was upscaled later, the one that was rendered.
    finished = made.finishes or result.sidecar.key.removeprefix(f"{OUTPUTS}/").removesuffix(".json")
    source = result.document.source
    job, job_id = spec.finishing(made, finished, PurePosixPath(source).stem or made.name, source, index)
    return Entry(
        job=job,
        job_id=job_id,
        priority=spec.priority,
        at=spec.at,
        notes=_notes(connection, storage, made, result),
        owner=spec.owner or settings.owner,
    )


def _notes(connection: redis.Redis, storage: Storage, made: Job, result: Result) -> dict[str, str]:
    """Return the notes of the job that made a video; where Redis has forgotten it, those that the storage still has."""
    (known,) = fetch_many(connection, [result.job_id])
    arguments = read_arguments(known) if known is not None else None
    if arguments is not None:
        return {name: text for name, text in arguments.notes.items() if name not in (LINK_NOTE, REPLACED_NOTE)}
    taken = ""
    with contextlib.suppress(UnavailableError, InputError, OSError):  # it was removed; then the render has the date
        taken = Capture.of_photo(open_photo(storage.read_input(made.image))).time_text
    return {name: text for name, text in {SOURCE_NOTE: result.document.source, TAKEN_NOTE: taken}.items() if text}
