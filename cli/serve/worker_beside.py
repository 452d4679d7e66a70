"""Runs `svdq worker` in a separate process that starts and stops with the server."""

import os
import signal
import subprocess
import sys
import threading
from typing import Self

from svdq.cli.formatting import echo
from svdq.pipeline.installed import require_torch
from svdq.producer.process_identity import die_with_parent
from svdq.producer.settings import Settings


class WorkerBeside:
    """Runs a worker with the settings of the server within a block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def __enter__(self) -> Self:
        """Start the worker.

        Raises:
            InputError: PyTorch is not installed.
        """
        require_torch("a worker beside the server")
        environment = os.environ | self._settings.environment()
        environment.pop("SVDQ_SERVE_TOKEN", None)
        # A separate session: Ctrl-C in the terminal would reach the worker, too, and make it finish all videos.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "svdq.cli", "worker"],
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        threading.Thread(target=self._watch, name="worker-beside", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker and wait for it; a Ctrl-C meanwhile stops it at once."""
        assert self._process is not None
        self.stop()
        while True:
            try:
                self._process.wait()
                return
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Let the worker stop after the step that it is working on; its videos are continued later."""
        self._is_stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _watch(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        if not self._is_stopping:
            echo(f"The worker has ended with exit code {code}: photos are accepted, and wait in the queue.", err=True)
