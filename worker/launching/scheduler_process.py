"""The scheduler beside the groups of one launcher: started, started again when it died, and ended. Knows no jobs."""

import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from svdq.producer.settings import Settings
from svdq.worker.launching.group_process import die_with_parent, environment_of

#: Seconds from the start of a scheduler until another one is started, should it have died.
RESTART_S = 2.0
#: Seconds that it gets to give back its locks.
END_S = 3.0


class SchedulerProcess:
    """A running `python -m svdq.worker.jobs.scheduler`, for the length of a block."""

    def __init__(self, settings: Settings) -> None:
        """Start it; it never forks from a rank, and the kernel ends it when this process is killed."""
        self._environment = environment_of(settings)
        self._start()

    def supervise(self) -> None:
        """Start it again if it has died."""
        if self._process.poll() is not None and time.monotonic() >= self._started_at + RESTART_S:
            self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "svdq.worker.jobs.scheduler"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher
            preexec_fn=die_with_parent(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
