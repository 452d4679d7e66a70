"""What the buttons of the page do with jobs, each through the function that the command line uses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import redis

from svdq.cli.serve.form import label_of
from svdq.cli.serve.older import Older
from svdq.cli.serve.spec import read_options
from svdq.pipeline.errors import InputError
from svdq.producer import control
from svdq.producer.job import Job, parse_job
from svdq.producer.queue import (
    SOURCE_NOTE,
    SvdqQueue,
    fetch_many,
    no_such_job,
    photo_of,
    queues,
    read_job,
    source_of,
)
from svdq.producer.results import verdicts
from svdq.producer.status.registries import newest_ids
from svdq.producer.status.status import JobView
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Enqueued, Entry, enqueue_many
from svdq.producer.submitting.options import SubmitOptions, make_job

#: Statuses of the jobs that have not started.
_WAITING = ("queued", "scheduled", "deferred")


def act(connection: redis.Redis, action: str, job_ids: Sequence[str]) -> list[str]:
    """Do an action, on each of the jobs if it is one on jobs; return a sentence for each that it does not apply to.

    Raises:
        InputError: there is no such action.
    """
    match action:
        case "pause":
            control.pause(connection)
        case "resume":
            control.resume(connection)
        case "cancel":
            return _each(job_ids, lambda job_id: control.cancel(connection, job_id))
        case "cancel-waiting":
            # Those that have just begun or ended are not meant.
            _each(newest_ids(connection, statuses=_WAITING), lambda job_id: control.cancel(connection, job_id))
        case "front":
            return _each(job_ids, lambda job_id: _move_to_front(connection, job_id))
        case "retry":
            return _each(job_ids, lambda job_id: control.retry(connection, job_id))
        case "keep" | "reject":
            verdicts.give(connection, job_ids, "keep" if action == "keep" else "reject")
        case "unmark":
            verdicts.give(connection, job_ids, None)
        case _:
            raise InputError(f"There is no action {action[:80]!r}; load the page again.")
    return []


def repeat(
    connection: redis.Redis, storage: Storage, older: Older, job_id: str, changes: Mapping[str, str], new_seed: int
) -> Enqueued:
    """Queue a video of the same photo: with another seed, or with the same one and changed parameters.

    Args:
        connection: to Redis.
        storage: with the photo.
        older: the videos of jobs that Redis has forgotten.
        job_id: the job to repeat.
        changes: new values of parameters as text.
        new_seed: seed of the new job unless there are changes.

    Raises:
        InputError: there is no such job, its photo was removed, or a value is not allowed.
    """
    (rq_job,) = fetch_many(connection, [job_id])
    forgotten = older.views([job_id]) if rq_job is None else []
    if rq_job is None and not forgotten:
        raise no_such_job(job_id)
    job = _job_of(forgotten[0]) if rq_job is None else read_job(rq_job)
    if job is None:
        raise InputError(f"Job {job_id!r} cannot be repeated: another version of svdq made it.")
    if not storage.has_input(job.image):
        raise InputError(f"The photo of {job.name!r} is not in the storage any more; drop it on the page again.")
    options = SubmitOptions().with_defaults_from(job.model_dump())
    given = read_options(changes).given() if changes else {"seed": new_seed}
    options = replace(options, **given)
    again = make_job(options, spell=label_of, image=job.image, name=job.name, folder=job.folder)
    source = forgotten[0].source if rq_job is None else source_of(rq_job)
    entry = Entry(
        job=again,
        job_id=again.digest(seed_was_drawn=False),
        photo="" if rq_job is None else photo_of(rq_job),
        priority="default" if rq_job is None else rq_job.origin.removeprefix("svdq-"),
        notes={SOURCE_NOTE: source} if source else {},
    )
    return enqueue_many(connection, [entry])[0]


def _job_of(view: JobView) -> Job | None:
    try:
        return parse_job(view.parameters)
    except ValueError:
        return None


def _each(job_ids: Iterable[str], do: Callable[[str], object]) -> list[str]:
    problems = []
    for job_id in job_ids:
        try:
            do(job_id)
        except InputError as error:
            problems.append(str(error))
    return problems


def _move_to_front(connection: redis.Redis, job_id: str) -> None:
    """Make a queued job the next one of all: move it to the front of the most urgent queue that has any."""
    waiting: list[SvdqQueue] = [queue for queue in queues(connection) if queue.count]
    priority = waiting[0].name.removeprefix("svdq-") if waiting else None
    control.move(connection, job_id, front=True, priority=priority)
