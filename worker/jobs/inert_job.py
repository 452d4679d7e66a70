"""Jobs that anyone may have written: read, judged and shown, never called. Touches RQ's internals, like `rq_adapter`.

Nothing that a job names is ever imported: its function, callbacks and webhooks are strings to compare.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import redis
import rq
from rq.exceptions import NoSuchJobError
from rq.serializers import JSONSerializer
from rq.utils import as_text

from svdq.producer.queue import RENDER


class InertJob(rq.job.Job):
    """An RQ job that calls nothing, whatever whoever wrote it to Redis has put into it; for RQ's maintenance, too."""

    def restore(self, raw_data: Any) -> None:
        """Read the job's hash; one that is not of RQ's shape counts as no job at all.

        Raises:
            NoSuchJobError: it cannot be read.
        """
        try:
            super().restore(raw_data)
        except NoSuchJobError:
            raise
        except Exception as error:
            raise NoSuchJobError(f"The hash of job {self.id} cannot be read: {error}") from error
        # What RQ's tools have written as pickle is not JSON, and must not keep the job from being written again.
        if not isinstance(self.meta, dict) or "unserialized" in self.meta:
            self.meta = {}

    @classmethod
    def find(cls, job_id: bytes | str, connection: redis.Redis) -> rq.job.Job | None:
        """Read a job; None when there is none of that id that can be read."""
        try:
            return cls.fetch(as_text(job_id), connection=connection, serializer=JSONSerializer)
        except (NoSuchJobError, ValueError, TypeError, redis.ResponseError):  # ValueError: not even the shape of an id
            return None

    @classmethod
    def fetch_many(
        cls, job_ids: Iterable[str], connection: redis.Redis, serializer: Any = None
    ) -> list[rq.job.Job | None]:
        """Read several jobs, such as those that depend on one; None for each that cannot be read."""
        return [cls.find(job_id, connection) for job_id in job_ids]

    def dependencies_are_met(self, *arguments: Any, **options: Any) -> bool:
        """Whether a job may be queued that waits for others; never, where it names as others what are no jobs."""
        try:
            return super().dependencies_are_met(*arguments, **options)
        except (ValueError, redis.ResponseError):
            return False

    def execute_failure_callback(self, *_: Any, **__: Any) -> None:
        """Call nothing."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


@dataclass(frozen=True, kw_only=True)
class Callback:
    """A function that a job wants called when it has ended."""

    #: on_success, on_failure or on_stopped.
    kind: str
    #: Its dotted name.
    name: str
    #: Seconds that it may take.
    timeout_s: int


def callbacks_of(rq_job: rq.job.Job) -> list[Callback]:
    """List the callbacks that a job names."""
    named = [
        ("on_success", rq_job._success_callback_name, rq_job.success_callback_timeout),
        ("on_failure", rq_job._failure_callback_name, rq_job.failure_callback_timeout),
        ("on_stopped", rq_job._stopped_callback_name, rq_job.stopped_callback_timeout),
    ]
    return [Callback(kind=kind, name=name, timeout_s=max(timeout_s, 1)) for kind, name, timeout_s in named if name]


def refusal_of(rq_job: rq.job.Job, allowed_callbacks: Collection[str] = ()) -> str | None:
    """Say what a job asks for that is not ours to run; None when nothing is. Compares strings and imports nothing."""
    try:
        function = rq_job.func_name
    except Exception:  # noqa: BLE001 - whoever wrote it; it is not JSON of RQ's shape
        return "It is not stored as JSON."
    if function != RENDER:
        return f"Its function {function!r} is not svdq's."
    for callback in callbacks_of(rq_job):
        if callback.name not in allowed_callbacks:
            return f"Its callback {callback.name!r} is not among those that the worker's SVDQ_CALLBACKS allows."
    if rq_job.webhooks:
        return f"Its webhook {rq_job.webhooks[0].url!r} is not sent: use a callback that SVDQ_CALLBACKS allows."
    return None
