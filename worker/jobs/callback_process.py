"""One callback of one ended job: `python -m svdq.worker.jobs.callback_process KIND ID`. Imports no torch.

Its function is called as RQ calls it: on_success(job, connection, result), on_failure(job, connection, type, value,
traceback), on_stopped(job, connection). What it raises or prints goes to the worker's log, and the job stays as it is.
"""

import signal
import sys
from collections.abc import Sequence

from rq.serializers import JSONSerializer
from rq.utils import import_attribute

from svdq.pipeline.errors import SvdqError
from svdq.producer.queue import connect
from svdq.producer.settings import Settings
from svdq.producer.status.status import last_sentence
from svdq.worker.jobs.inert_job import InertJob, callbacks_of

#: Seconds that a callback gets at most, whatever its job asks for.
MAX_S = 600


def main(arguments: Sequence[str]) -> None:
    """Call it."""
    kind, job_id = arguments
    # A rank blocks signals in its threads, and its children inherit that; the alarm holds when the rank is gone.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    settings = Settings.load()
    with connect(settings) as connection:
        job = InertJob.fetch(job_id, connection=connection, serializer=JSONSerializer)
        callback = next(callback for callback in callbacks_of(job) if callback.kind == kind)
        if callback.name not in settings.callbacks:  # asked again, of the Redis of now
            raise SvdqError(f"The callback {callback.name!r} is not one of SVDQ_CALLBACKS.")
        signal.alarm(min(callback.timeout_s, MAX_S))
        function = import_attribute(callback.name)
        if kind == "on_success":
            function(job, connection, job.return_value())
        elif kind == "on_failure":
            result = job.latest_result()
            error = SvdqError(last_sentence(result.exc_string if result else None))
            function(job, connection, type(error), error, None)
        else:
            function(job, connection)


if __name__ == "__main__":
    main(sys.argv[1:])
