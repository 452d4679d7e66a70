"""Reserves the last bytes of a disk for Redis: videos and checkpoints never fill the disk completely.

The embedded Redis server exits when it cannot write. It needs little space to record that jobs have ended.
"""

import errno
import os
import shutil
from pathlib import Path

#: Bytes that videos, photos and checkpoints leave free on a disk; less on small disks.
RESERVE_BYTES = 32 * 2**20
#: Share of a small disk that stays free.
_SMALL_DISK_SHARE = 1 / 32


def reserve_bytes(folder: Path) -> int:
    """Return the number of bytes to leave free on the disk of a folder."""
    return min(RESERVE_BYTES, int(shutil.disk_usage(folder).total * _SMALL_DISK_SHARE))


def check_room(folder: Path) -> None:
    """Check that a file may be written in a folder.

    Raises:
        OSError: ENOSPC, only the reserve is left.
    """
    free = shutil.disk_usage(folder).free
    if free < reserve_bytes(folder):
        reason = f"{os.strerror(errno.ENOSPC)}: the last {free / 2**20:.1f} MiB of the disk are kept for the queue"
        raise OSError(errno.ENOSPC, reason, str(folder))
