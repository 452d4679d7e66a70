"""Runs `svdq worker` in a separate process that starts and stops with the server."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from svdq.cli.formatting import echo
from svdq.pipeline.installed import require_torch
from svdq.producer.process_identity import die_with_parent
from svdq.producer.settings import Settings


@contextlib.contextmanager
def worker_beside(settings: Settings) -> Iterator[None]:
    """Run a worker within a block.

    After the block the worker stops after its current step, and its videos are continued later; a Ctrl-C stops it at
    once.

    Raises:
        InputError: PyTorch is not installed.
    """
    require_torch("a worker beside the server")
    environment = os.environ | settings.environment()
    environment.pop("SVDQ_SERVE_TOKEN", None)
    environment["PYTHONSAFEPATH"] = "1"  # else `python -m` imports ./svdq of the current folder
    # A separate session: Ctrl-C in the terminal would reach the worker, too, and make it finish all videos.
    process = subprocess.Popen(
        [sys.executable, "-m", "svdq.cli", "worker"],
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    is_stopping = threading.Event()

    def watch() -> None:
        code = process.wait()
        if not is_stopping.is_set():
            echo(f"The worker has ended with exit code {code}: photos are accepted, and wait in the queue.", err=True)

    threading.Thread(target=watch, name="worker-beside", daemon=True).start()
    try:
        yield
    finally:
        is_stopping.set()
        process.terminate()
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                process.terminate()
