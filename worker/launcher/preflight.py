"""Checks before any rank starts: the home, the model, the storage, and whether another burst uses the same devices.

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
from svdq.pipeline.models.files import fingerprint, loaded_files
from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.names import has_weights, timings_of
from svdq.pipeline.models.options import DTYPES, WEIGHTS
from svdq.pipeline.models.registry import family_of, layout_of
from svdq.producer.embedded_redis.socket_path import make_home
from svdq.producer.storage.storage import Storage
from svdq.worker.launcher.gpus import visible_gpus

#: Folder under SVDQ_HOME. Its files are never removed: a second run could then lock a new file of the same name.
LOCKS = "locks"
#: Folder under SVDQ_HOME with a folder for each running launcher.
RUN = "run"
#: Bytes that a home must have room for, about those of a run folder; a full disk still takes empty files.
PROBE_BYTES = 2**14


def check_model(name: str, *, on_gpus: bool | None = None, dtype: str = "auto") -> None:
    """Check that a model is on this machine and complete, as far as is possible without torch.

    For ranks on GPUs half precision weights do; `on_gpus` is None if that is unknown. `dtype` is that of
    `ComputeOptions`.

    Raises:
        InputError: the model cannot be used.
    """
    if has_weights(name):
        assumed = None if on_gpus is None else WEIGHTS["float16" if on_gpus else "float32"]
        half = WEIGHTS[DTYPES[dtype]] if dtype in DTYPES else assumed
        folder = find_folder(name)
        check_folder(folder, name, layout_of(folder, name), half=half)
    elif name != "preview":
        timings_of(name)


def model_fingerprint(name: str, *, on_gpus: bool, dtype: str) -> str | None:
    """Return a hash by which weights and configs under the same name can be distinguished; None without weights.

    The launcher computes it, since a rank opens no weights of an expert that it does not load. `dtype` is that of
    `ComputeOptions`.
    """
    if not has_weights(name):
        return None
    folder = find_folder(name)
    layout = layout_of(folder, name)
    default = DTYPES[family_of(folder, name).half] if on_gpus else "float32"
    weights: list[Path] = []
    for component in layout.weighted:
        torch_dtype = "float32" if component in layout.float32 else DTYPES.get(dtype, default)
        weights += loaded_files(folder, component, WEIGHTS[torch_dtype])
    return fingerprint(folder, [folder / "model_index.json", *sorted(folder.glob("*/*config.json")), *weights])


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
