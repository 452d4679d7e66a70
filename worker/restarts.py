"""Ends a rank's process so that torchrun restarts its group, and counts the crash after the restart."""

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

#: Seconds after the end of a neighbor in which the signal that ended it may still arrive here.
STOP_HEARD_S: Final = 1.0
#: Seconds before a group that was restarted tries to start again.
RELOAD_S: Final = 10.0


def exit_without_neighbor(reason: str, stopping: threading.Event, marker: CrashMarker) -> None:
    """End the process because a neighbor has ended: torchrun restarts the group, and its jobs are taken again."""
    marker.mark_clean_exit()
    # All ranks get the signal to stop at once, but it may reach a neighbor first.
    if not stopping.wait(STOP_HEARD_S):
        logger.error("%s", reason)
        os._exit(1)


def exit_after_stall(monitor: ProgressMonitor, marker: CrashMarker) -> None:
    """End the process because its step does not end; the restarted group counts this for the job."""
    marker.mark_stalled()
    monitor.close()
    os._exit(1)


def exit_for_restart(error: InputError, restart_count: int) -> NoReturn:
    """Wait, then end the process so that torchrun restarts the group, if it worked before.

    Raises:
        InputError: this is the first start of the group, so the user has to fix the cause.
    """
    if restart_count == 0:
        raise error
    # The cause may be temporary, such as memory that another program uses.
    logger.warning("%s The group worked before, so it tries again in %.0f s.", error, RELOAD_S)
    time.sleep(RELOAD_S)
    os._exit(1)


def count_host_crash(url: str, marker: CrashMarker) -> None:
    """Count in Redis the jobs that ranks of this host worked on when they died; rank 0 does this for its own host."""
    suspects = read_suspects(marker.folder, marker.restart_count)
    if suspects:
        connection = connect(url)
        wait_for(connection, ConnectionHealth())
        count_crash(connection, suspects)
