"""Submits jobs that upscale finished videos, without denoising them again."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.image import open_photo
from svdq.producer.connection import session
from svdq.producer.job import Job, latents_key, parse_job
from svdq.producer.name_templates import MAX_STEM_BYTES
from svdq.producer.queue import fetch_many, read_arguments
from svdq.producer.records import LINK_NOTE, REPLACED_NOTE, SOURCE_NOTE, TAKEN_NOTE
from svdq.producer.results.fetch import results_of
from svdq.producer.results.finished_videos import OUTPUTS, Result, find_results
from svdq.producer.results.holders import record_copies
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.checking import Observer
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry, Submission
from svdq.producer.submitting.foresight import check_max_waiting, foresee
from svdq.producer.submitting.job_spec import ANY_DAY, JobSpec
from svdq.producer.submitting.model_choice import render_again
from svdq.producer.submitting.new_job import valid_job
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import claim_storage, forced_once
from svdq.producer.verdicts import ids_with_verdict


def finish_requests(
    settings: Settings, spec: JobSpec, job_ids: Sequence[str], *, kept: bool = False
) -> list[PhotoRequest]:
    """Ask for the videos of jobs, by prefixes of their ids, or for those that are marked to keep, to be upscaled.

    Raises InputError unless `spec` says how to upscale and nothing else about the video, as `results_of`, and where
    there is none.
    """
    plain = JobSpec(
        drafts=(Draft(upscale=spec.drafts[0].upscale),),
        **{name: getattr(spec, name) for name in ("expected", "priority", "name", "folder", "at", "force", "owner")},
    )
    if not spec.drafts[0].upscale or spec != plain:
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
            ids = ids_with_verdict(connection, "keep")
        results = sorted(find_results(storage, job_ids=ids), key=lambda result: result.finished_at) if ids else []
        if not results:
            raise InputError("No finished video is marked to keep; mark some with `svdq mark keep ID`, or on the page.")
    else:
        results = results_of(settings, storage, job_ids)
    return [PhotoRequest(result=result, spec=spec) for result in results]


def submit_finishing(
    settings: Settings,
    requests: Sequence[PhotoRequest],
    *,
    skip_bad: bool = False,
    dry_run: bool = False,
    observer: Observer | None = None,
    connection: redis.Redis | None = None,
    storage: Storage | None = None,
) -> Iterator[Submission]:
    """Enqueue a job for each finished video, and yield it; all are checked before. Otherwise as `submit_all`."""
    observer, storage = observer or Observer(), storage or Storage.open_for_command(settings.storage)
    with session(settings, connection) as connection, forced_once(connection, requests, dry_run) as requests:
        entries: dict[str, Entry] = {}
        copies: dict[str, str] = {}  # the job whose video each upscales
        for index, request in enumerate(requests, 1):
            try:
                assert request.result is not None
                entry = _entry(settings, connection, storage, request.result, request.spec, index)
            except InputError as error:
                if not skip_bad:
                    raise
                observer.leave_out(str(error))
            else:
                entries.setdefault(entry.job_id, entry)
                copies.setdefault(entry.job_id, request.result.job_id)
        check_max_waiting(connection, entries.values(), settings.max_waiting)
        if dry_run:
            yield from foresee(connection, entries.values())
            return
        claim_storage(connection, storage)
        record_copies(
            connection, {each: origin for each, origin in copies.items() if origin != entries[each].job.original}
        )
        yield from render_again(connection, storage, enqueue_many(connection, list(entries.values())))


def _entry(
    settings: Settings, connection: redis.Redis, storage: Storage, result: Result, spec: JobSpec, index: int
) -> Entry:
    """Create the job that upscales a finished video; its files are beside the video's unless there is a template."""
    where = storage.location(result.sidecar.key)
    try:
        made = parse_job(result.document.job)
    except ValueError as error:
        raise InputError(f"{where!r} is of another version of svdq; submit its photo with --upscale.") from error
    if "mp4" not in made.formats and not storage.exists(latents_key(result.job_id)):
        raise InputError(
            f"The video {made.name!r} ({result.job_id}) has neither an mp4 nor kept latents; submit its photo with "
            f"`--like {shlex.quote(where)} --upscale {spec.drafts[0].upscale}`."
        )
    # Of a video that was upscaled later, the one that was rendered.
    finished = made.finishes or result.sidecar.key.removeprefix(f"{OUTPUTS}/").removesuffix(".json")
    values = made.model_dump() | {"upscale": spec.drafts[0].upscale, "chained": False, "finishes": finished}
    job = valid_job(type(made), values)
    source, notes = result.document.source, _notes(connection, storage, made, result)
    taken = Capture.parse(notes.get(TAKEN_NOTE, ""), "").time
    of_id, of_files = (
        spec.placed(job, PurePosixPath(source).stem or made.name, source, number, day=day, taken=taken)
        for number, day in ((0, ANY_DAY), (index, None))
    )
    if not spec.folder:  # beside the video
        of_id, of_files = (each.model_copy(update={"folder": made.folder}) for each in (of_id, of_files))
    given_name = of_id.name if spec.name is not None else ""
    job_id = of_id.digest(seed_was_drawn=False, given_name=given_name, nonce=spec.nonce)
    if spec.name is None and not storage.exists(of_files.sidecar_key(job_id)):  # earlier versions kept the name
        of_files = of_files.model_copy(update={"name": _upscaled_name(made, job)})
    return Entry(job=of_files, job_id=job_id, priority=spec.priority, at=spec.at, notes=notes, owner=spec.owner)


def _upscaled_name(made: Job, job: Job) -> str:
    """Return the name of an upscaled copy, such as `cup-2x` or `cup-1920x1080`; a copy's own copy is named alike."""
    name = made.name.removesuffix(_ending(made)) if made.finishes else made.name
    return f"{name.encode()[:MAX_STEM_BYTES].decode(errors='ignore')}{_ending(job)}"


def _ending(job: Job) -> str:
    return f"-{job.upscale}" if "x" in job.upscale else f"-{job.upscale}x"


def _notes(connection: redis.Redis, storage: Storage, made: Job, result: Result) -> dict[str, str]:
    """Return the notes of the job that made a video; where Redis has forgotten it, those that the storage still has."""
    (known,) = fetch_many(connection, [result.job_id])
    arguments = read_arguments(known) if known is not None else None
    if arguments is not None:
        return {name: text for name, text in arguments.notes.items() if name not in (LINK_NOTE, REPLACED_NOTE)}
    taken = result.document.taken
    with contextlib.suppress(UnavailableError, InputError, OSError):  # it was removed; then the render has the date
        taken = taken or Capture.of_photo(open_photo(storage.read_input(made.image))).time_text
    return {name: text for name, text in {SOURCE_NOTE: result.document.source, TAKEN_NOTE: taken}.items() if text}
