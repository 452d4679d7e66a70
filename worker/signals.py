"""Signals of one rank: SIGINT takes no more jobs, SIGTERM stops after the current step.

They are blocked in every thread, and one thread waits for them. Python's own handlers run only between two bytecodes of
the main thread, so they would wait for the end of a step.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Signals:
    """Waits for signals from its creation on; create it before any other thread is started."""

    def __init__(self, on_stop: Callable[[], object]) -> None:
        """Block the signals and start the thread; SIGTERM calls `on_stop` at once, before anything is stopped."""
        self._on_stop = on_stop
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        #: Set on SIGTERM.
        self.stopping = threading.Event()
        self._is_draining = False
        self._stop: Callable[[], object] | None = None
        self._drain: Callable[[], object] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def attach(self, stop: Callable[[], object], drain: Callable[[], object] | None) -> None:
        """Set what the signals call from now on; a SIGINT that came before is handled now.

        `stop` makes the rank stop after the current step; `drain` makes the group take no more jobs: rank 0 has one.
        """
        with self._lock:
            self._stop, self._drain = stop, drain
            if self._is_draining and drain is not None:
                drain()

    def _run(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            with self._lock:
                if number == signal.SIGTERM:
                    self._on_sigterm()
                else:
                    self._on_sigint()

    def _on_sigterm(self) -> None:
        self.stopping.set()
        self._on_stop()
        if self._stop is None:
            # The rank still loads the model or waits for the other ranks, so it holds no jobs.
            os._exit(0)
        self._stop()

    def _on_sigint(self) -> None:
        self._is_draining = True
        if self._drain is not None:
            logger.info("Taking no more jobs; those in flight are finished first. Ctrl-C again stops now.")
            self._drain()
