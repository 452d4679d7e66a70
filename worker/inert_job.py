"""Jobs that anyone may have written: read, judged and shown, never called. Touches RQ's internals, like `rq_adapter`.

Nothing that a job names is ever imported: its function, callbacks and webhooks are strings to compare.
"""

from typing import Any

import rq
from rq.exceptions import NoSuchJobError

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

    def execute_failure_callback(self, *_: Any, **__: Any) -> None:
        """Call nothing."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send nothing."""


def refusal_of(rq_job: rq.job.Job) -> str | None:
    """Say what a job asks for that is not ours to run; None when nothing is. Compares strings and imports nothing."""
    try:
        function = rq_job.func_name
    except Exception:  # noqa: BLE001 - whoever wrote it; it is not JSON of RQ's shape
        return "It is not stored as JSON."
    if function != RENDER:
        return f"Its function {function!r} is not svdq's."
    callbacks = [rq_job._success_callback_name, rq_job._failure_callback_name, rq_job._stopped_callback_name]
    for callback in callbacks:
        if callback:
            return f"Its callback {callback!r} is not svdq's."
    if rq_job.webhooks:
        return f"Its webhook {rq_job.webhooks[0].url!r} is not svdq's."
    return None
