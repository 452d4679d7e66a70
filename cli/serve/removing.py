"""Deletes videos, also those in flight, which stop after their current step."""

import asyncio
import time

from starlette.datastructures import State

from svdq.cli.serve.errors import ApiError
from svdq.producer.queue import fetch_many
from svdq.producer.results.removal import remove_job

#: Seconds that a request waits for a video in flight to stop, and seconds after which nobody waits any more.
WAIT_S = 1.5
GIVE_UP_S = 600.0
POLL_S = 0.25


async def remove(state: State, job_id: str) -> None:
    """Remove a job; one that is in flight is canceled, and removed when it has stopped."""
    begun_at = time.monotonic()
    while not await _remove_now(state, job_id):
        if time.monotonic() - begun_at > WAIT_S:
            task = asyncio.create_task(_remove_later(state, job_id))
            state.removals.add(task)
            task.add_done_callback(state.removals.discard)
            break
        await asyncio.sleep(POLL_S)
    state.polls.forget(job_id)
    state.pages.forget()


async def _remove_later(state: State, job_id: str) -> None:
    end = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end:
        await asyncio.sleep(1)
        try:
            if await _remove_now(state, job_id):
                state.polls.forget(job_id)
                state.pages.forget()
                return
        except ApiError:
            continue  # Redis is away


async def _remove_now(state: State, job_id: str) -> bool:
    """Remove a job; return False while it is in flight."""
    backend = state.backend

    def work(connection: object) -> bool:
        [found] = fetch_many(connection, [job_id])  # type: ignore[arg-type]
        return found is None or remove_job(connection, backend.storage, job_id)  # type: ignore[arg-type]

    done: bool = await backend.write(work)
    return done
