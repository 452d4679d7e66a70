"""The signals of one rank: SIGINT takes no more jobs, SIGTERM stops after the step that is being computed.

They are blocked in every thread and taken by one that does nothing else, since a rank deep in a step must hear them at
once; Python's own handlers would wait for the step.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable

from svdq.pipeline.stage import Stage
from svdq.worker.intake.intake import Intake

logger = logging.getLogger(__name__)

SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Signals:
    """Listens from the moment it is made, which must be before any other thread is started."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        """Begin to listen.

        Args:
            on_stop: called at once when this rank is told to stop.
        """
        self._on_stop = on_stop
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        #: Whether this rank was told to stop.
        self.stopping = threading.Event()
        self._draining = False
        self._stage: Stage | None = None
        self._intake: Intake | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def attach(self, stage: Stage, intake: Intake | None) -> None:
        """Name what is to be stopped; on rank 0 with the intake, which may have to drain from the start."""
        with self._lock:
            self._stage, self._intake = stage, intake
            if self._draining and intake is not None:
                intake.drain()

    def _run(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            with self._lock:
                if number == signal.SIGTERM:
                    self._stop()
                else:
                    self._drain()

    def _stop(self) -> None:
        self.stopping.set()
        self._on_stop()
        if self._stage is None:
            # Still loading the model or waiting for the other ranks: there is nothing to give back.
            os._exit(0)
        self._stage.stop()
        if self._intake is not None:
            self._intake.stop()

    def _drain(self) -> None:
        self._draining = True
        if self._intake is not None:
            logger.info("Taking no more jobs; those in flight are finished first. Ctrl-C again stops now.")
            self._intake.drain()
