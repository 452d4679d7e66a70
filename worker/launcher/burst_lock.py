"""A lock for each device of a home, so that a run which has not ended keeps the next one off its devices.

For `svdq worker --burst`, which cron starts again and again. The kernel frees a lock however its holder ends.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from svdq.worker.launcher.gpus import visible_gpus
from svdq.worker.launcher.launch import LaunchOptions

#: Folder under SVDQ_HOME. The files in it stay: removing one would let a second run lock a new file of its name.
FOLDER = "locks"


def devices_of(options: LaunchOptions) -> list[str]:
    """Name the devices that a run computes on: those GPUs that it sees and has ranks for, else the processor."""
    gpus = [] if options.device == "cpu" else visible_gpus()
    if not gpus:
        return ["cpu"]
    num_ranks = options.ranks * options.groups if options.ranks else len(gpus)
    return [f"gpu {name}" for name in gpus[:num_ranks]]


@contextlib.contextmanager
def burst_lock(home: Path, devices: Sequence[str]) -> Iterator[str | None]:
    """Hold the locks of devices for a block; gives the sentence who has one when another run does, else None."""
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        for device in sorted(devices):
            # Not inherited: ranks that outlive a killed launcher for some seconds end by themselves.
            descriptor = os.open(
                folder / f"burst-{re.sub(r'[^A-Za-z0-9-]', '-', device)}", os.O_RDWR | os.O_CREAT, 0o600
            )
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                yield (
                    f"Another `svdq worker --burst` of this home works on the same device ({device}, {holder}); this "
                    "one leaves the queue to it. With --no-lock it would not."
                )
                return
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M}\n".encode(), 0)
        yield None
