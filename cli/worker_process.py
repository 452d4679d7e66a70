"""A worker as a child of another command, `svdq serve --with-worker` or `svdq setup`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from svdq.producer.processes import die_with_parent
from svdq.producer.settings import Settings

#: `Settings.on_demand` of a worker beside a page, which runs all day, unless something else is set.
BESIDE_A_PAGE = "10m"


@contextlib.contextmanager
def worker_process(settings: Settings, options: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker within a block; it then stops after its current step, or at once on a Ctrl-C."""
    environment = os.environ | settings.environment()
    environment.pop("SVDQ_SERVE_TOKEN", None)
    environment["PYTHONSAFEPATH"] = "1"  # else `python -m` imports ./svdq of the current folder
    # A separate session: Ctrl-C in the terminal would reach the worker, too, and make it finish all videos.
    process = subprocess.Popen(
        [sys.executable, "-m", "svdq.cli", "worker", *options],
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    try:
        yield process
    finally:
        process.terminate()
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                process.terminate()
