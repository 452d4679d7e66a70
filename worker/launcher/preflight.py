"""Checks before any rank starts: the home, the storage, and whether another burst uses the same devices.

Does not import torch.
"""

import contextlib
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from svdq.pipeline.errors import UnavailableError
from svdq.producer.files import make_home
from svdq.producer.storage.storage import Storage
from svdq.worker.launcher.gpus import visible_gpus

#: Folder under SVDQ_HOME. Its files are never removed: a second run could then lock a new file of the same name.
LOCKS = "locks"
#: Folder under SVDQ_HOME with a folder for each running launcher.
RUN = "run"
#: Bytes that a home must have room for, about those of a run folder; a full disk still takes empty files.
PROBE_BYTES = 2**14


def check_storage(url: str) -> None:
    """Check that this user may write to the storage; ranks wait for a storage that is unavailable or full.

    Raises:
        UnavailableError: it is read-only.
    """
    try:
        Storage(url).check_writable()
    except UnavailableError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def check_home(home: Path) -> None:
    """Make the folder of runs, and check that this user may write to it and that its disk has room.

    Raises:
        UnavailableError: that is impossible.
    """
    try:
        make_home(home)
        (home / RUN).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=home / RUN) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise UnavailableError(
            f"The folder {str(home)!r} cannot be written ({error.strerror}); set SVDQ_HOME to a folder that you can "
            "write to."
        ) from error


def devices_of(device: str, num_ranks: int | None) -> list[str]:
    """Name the devices that a run uses: as many visible GPUs as it has ranks (None: all of them), else `cpu`."""
    gpus = [] if device == "cpu" else visible_gpus()
    return [f"gpu {name}" for name in gpus[:num_ranks]] or ["cpu"]


@contextlib.contextmanager
def burst_lock(home: Path, devices: Sequence[str]) -> Iterator[str | None]:
    """Hold a lock for each device during a block; yield a sentence if another run holds one of them, else None.

    Cron starts a burst again and again. The kernel frees a lock however its holder ends.
    """
    folder = home / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        for device in sorted(devices):
            # Ranks do not inherit it: those that outlive a killed launcher end by themselves within seconds.
            path = folder / f"burst-{re.sub(r'[^A-Za-z0-9-]', '-', device)}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                yield (
                    f"Another `svdq worker --burst` of this home uses the same device ({device}, {holder}); this one "
                    "leaves the queue to it. With --no-lock it would not."
                )
                return
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M}\n".encode(), 0)
        yield None
