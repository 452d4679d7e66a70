"""Python loads a module of this name by itself at its start: here it puts faults into the ranks of a campaign.

The harness puts this folder on a worker's PYTHONPATH, so that svdq itself has no switch for faults. FAULTS_AT says
where, FAULTS_FOLDER names a folder through which the harness counts and controls:

- windows (`after-pop`, …): the process kills itself there, every second time it comes by, while files `kill*` are left;
  each kill uses one up;
- `full` and `slow`: while the file `on` is there, writes to the storage fail with ENOSPC, or take two seconds.
"""

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds that a write takes on a slow storage.
SLOW_S = 2.0


def _wrap(owner: object, name: str, *, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        answer = original(*arguments, **named)
        if after is not None:
            after()
        return answer

    setattr(owner, name, wrapped)


def _killer(folder: Path) -> Callable[[], None]:
    visits = 0

    def pass_by() -> None:
        nonlocal visits
        visits += 1
        left = sorted(folder.glob("kill*"))
        if visits % 2 == 0 and left:
            left[0].rename(left[0].with_name(f"done-{left[0].name}"))
            os.kill(os.getpid(), signal.SIGKILL)

    return pass_by


def _refuse(folder: Path) -> None:
    if (folder / "on").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _dawdle(folder: Path) -> None:
    if (folder / "on").exists():
        time.sleep(SLOW_S)


def _install(where: str, folder: Path) -> None:
    from svdq.producer.storage import folder_files, storage
    from svdq.worker.jobs.rq_adapter import GroupWorker

    match where:
        case "after-pop":  # taken off the queue, nothing else
            _wrap(GroupWorker, "_admit", before=_killer(folder), after=None)
        case "after-admission":  # its execution is registered, nobody works on it
            _wrap(GroupWorker, "_admit", before=None, after=_killer(folder))
        case "after-rename":  # the video has its final name, its sidecar is not written
            _wrap(storage.Storage, "publish", before=None, after=_killer(folder))
        case "before-acknowledgement":  # all files are there, Redis does not know
            _wrap(GroupWorker, "succeed", before=_killer(folder), after=None)
        case "full":
            _wrap(folder_files, "_publish", before=functools.partial(_refuse, folder), after=None)
        case "slow":
            _wrap(folder_files, "_publish", before=functools.partial(_dawdle, folder), after=None)
        case _:
            raise ValueError(f"There is no point {where!r} to put a fault into.")


# Ranks only: torchrun gives them RANK.
if "RANK" in os.environ and "FAULTS_AT" in os.environ:
    _install(os.environ["FAULTS_AT"], Path(os.environ["FAULTS_FOLDER"]))
