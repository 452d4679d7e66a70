"""How a rank's process ends before its time, for torchrun to restart its group, and what the next one makes of it."""

import logging
import os
import threading
import time
from typing import Final, NoReturn

from svdq.pipeline.errors import InputError
from svdq.worker.health.crash_marker import CrashMarker, read_suspects
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.queue.crash_count import count_crash
from svdq.worker.redis_client import ConnectionHealth, connect, wait_for

logger = logging.getLogger(__name__)

#: Seconds after a neighbour is gone in which the signal that ended it may still arrive here.
STOP_HEARD_S: Final = 1.0
#: Seconds before a group that was restarted tries once more to begin.
RELOAD_S: Final = 10.0


def lost(reason: str, stopping: threading.Event, marker: CrashMarker) -> None:
    """End the process when a neighbour is gone: torchrun then restarts the group, and its jobs are taken again."""
    marker.mark_clean_exit()
    # All ranks are told to stop at once, but a neighbour may have heard it first.
    if not stopping.wait(STOP_HEARD_S):
        logger.error("%s", reason)
        os._exit(1)


def stalled(monitor: ProgressMonitor, marker: CrashMarker) -> None:
    """End the process when its step does not end; the restarted group counts that against the step's job."""
    marker.mark_stalled()
    monitor.close()
    os._exit(1)


def try_again(error: InputError, restart_count: int) -> NoReturn:
    """End the process a little later, for torchrun to restart the group, if the group has worked before.

    Raises:
        InputError: the group was not restarted, so a person has to fix the cause.
    """
    if restart_count == 0:
        raise error
    # What is in the way now may go again, such as memory that somebody else has taken meanwhile.
    logger.warning("%s It did work before the restart, so the group tries again in %.0f s.", error, RELOAD_S)
    time.sleep(RELOAD_S)
    os._exit(1)


def count_crash_here(url: str, marker: CrashMarker) -> None:
    """Count in Redis what ranks of this host were working on when they died; rank 0 does it for its own host."""
    suspects = read_suspects(marker.folder, marker.restart_count)
    if suspects:
        connection = connect(url)
        wait_for(connection, ConnectionHealth())
        count_crash(connection, suspects)
