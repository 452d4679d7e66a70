"""Reads single jobs for many clients that poll: those that are asked for together are read together."""

import asyncio

import redis

from svdq.cli.serve.backend import Backend
from svdq.cli.serve.sharing import Shared
from svdq.producer.keys import QUEUE_NAMES
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.snapshot import estimate
from svdq.producer.status.status import JobView, view_many

#: A job and when it will be done; None if there is no such job.
Polled = tuple[JobView, Estimate | None] | None


class Polls:
    """Reads jobs by id; each at most once a second, and as many as are waiting in one go."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shared: Shared[str, Polled] = Shared(self._read)
        self._waiting: dict[str, asyncio.Future[Polled]] = {}
        self._is_reading = asyncio.Lock()

    async def get(self, job_id: str) -> Polled:
        """Return a job, at most a second old.

        Raises:
            ApiError: Redis is away.
        """
        return await self._shared.get(job_id)

    def forget(self, job_id: str) -> None:
        """Read a job anew at the next request."""
        self._shared.forget(job_id)

    async def _read(self, job_id: str) -> Polled:
        future = self._waiting.setdefault(job_id, asyncio.get_running_loop().create_future())
        async with self._is_reading:
            # The first reads what others have asked for meanwhile.
            if not future.done():
                batch, self._waiting = self._waiting, {}
                try:
                    found = await self._backend.read(lambda connection: _read_all(connection, list(batch)))
                except BaseException as error:
                    for each in batch.values():
                        if not each.done():
                            each.set_exception(error)
                            each.exception()  # retrieved: some may be asked for by nobody any more
                    raise
                for key, each in batch.items():
                    each.set_result(found.get(key))
        return await future


def _read_all(connection: redis.Redis, job_ids: list[str]) -> dict[str, Polled]:
    # Other programs may have jobs in the same Redis. A record that cannot be read has no queue.
    views = [view for view in view_many(connection, job_ids) if view.queue in (*QUEUE_NAMES, "")]
    pending = [view for view in views if not view.ended]
    estimates = estimate(connection, pending) if pending else {}
    return {view.id: (view, estimates.get(view.id)) for view in views}
