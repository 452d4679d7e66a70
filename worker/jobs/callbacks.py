"""Runs the callbacks that ended jobs name: only those that the setting allows, each in a process of its own.

So no callback holds up the stage loop or the leases of jobs, and each is ended when it takes too long. One is run once
at most: what still runs or waits when its group is stopped, or dies, is not run again.
"""

import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from svdq.producer.settings import Settings
from svdq.worker.jobs.callback_process import MAX_S
from svdq.worker.jobs.inert_job import Callback
from svdq.worker.launching.group_process import environment_of

logger = logging.getLogger(__name__)

#: Callbacks that run at once; the others wait.
NUM_AT_ONCE = 2


class Callbacks:
    """The callbacks of one group."""

    def __init__(self, settings: Settings) -> None:
        """Make it; no thread is started before the first callback."""
        #: Dotted names of the functions that may be named.
        self.allowed = frozenset(settings.callbacks)
        self._environment = environment_of(settings)
        self._pool = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="callbacks")
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def run(self, job_id: str, callback: Callback) -> None:
        """Run a callback of a job that has ended, beside everything else."""
        self._pool.submit(self._run, job_id, callback)

    def close(self, *, wait: bool) -> None:
        """Run nothing more: after all that is left, or at once."""
        if not wait:
            with self._lock:
                self._is_closed = True
                for process in self._running:
                    process.kill()
        self._pool.shutdown(wait=True)

    def _run(self, job_id: str, callback: Callback) -> None:
        with self._lock:
            if self._is_closed:
                return
            process = subprocess.Popen(
                [sys.executable, "-m", "svdq.worker.jobs.callback_process", callback.kind, job_id],
                env=self._environment,
                stdin=subprocess.DEVNULL,
            )
            self._running.add(process)
        limit_s = min(callback.timeout_s, MAX_S)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            logger.error("The callback %s of job %s took more than %d s and was ended.", callback.name, job_id, limit_s)
        else:
            if code:
                logger.error("The callback %s of job %s failed: exit code %d.", callback.name, job_id, code)
        finally:
            with self._lock:
                self._running.discard(process)
