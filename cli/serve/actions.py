"""What the page and the API do with jobs, each through the function that the command line uses."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

import redis
from starlette.datastructures import State

from svdq.cli.serve.errors import ApiError
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer import control
from svdq.producer.queue import SvdqQueue, fetch_many, queues
from svdq.producer.results import verdicts
from svdq.producer.results.removal import remove_job
from svdq.producer.status.registries import newest_ids

#: Seconds that a request waits for a video in flight to stop, and seconds after which nobody waits any more.
WAIT_S = 1.5
GIVE_UP_S = 600.0
POLL_S = 0.25


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
            outcomes = control.cancel_many(connection, job_ids)
            return [str(outcome) for _, outcome in outcomes if isinstance(outcome, InputError)]
        case "cancel-waiting":
            for _ in control.cancel_many(connection, newest_ids(connection, statuses=control.WAITING)):
                pass  # those that have just begun or ended are not meant
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


async def remove(state: State, job_id: str) -> None:
    """Remove a job; one that is in flight is canceled, and removed when it has stopped.

    Raises:
        ApiError: Redis is away.
        UnavailableError: the storage cannot be reached.
    """
    if not await _remove_now(state, job_id):
        task = asyncio.create_task(_remove_later(state, job_id))
        state.removals[job_id] = task
        task.add_done_callback(lambda _: state.removals.pop(job_id, None))
        await asyncio.wait({task}, timeout=WAIT_S)


async def _remove_later(state: State, job_id: str) -> None:
    end = time.monotonic() + GIVE_UP_S
    is_removed = False
    while not is_removed and time.monotonic() < end:
        await asyncio.sleep(POLL_S)
        with contextlib.suppress(ApiError, UnavailableError):  # Redis or the storage is away
            is_removed = await _remove_now(state, job_id)


async def _remove_now(state: State, job_id: str) -> bool:
    """Remove a job; return False while it is in flight."""

    def work(connection: redis.Redis) -> bool:
        [found] = fetch_many(connection, [job_id])
        return found is None or remove_job(connection, state.backend.storage, job_id)

    is_removed: bool = await state.backend.write(work)
    state.polls.forget(job_id)
    state.pages.forget()
    return is_removed
