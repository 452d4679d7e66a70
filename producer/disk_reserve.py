"""Keeps the end of a disk free for the queue: svdq's videos and checkpoints never fill it to the last byte.

The embedded Redis server ends when it cannot write. It needs little room, and what it writes is that jobs have ended.
"""

import errno
import os
import shutil
from pathlib import Path

#: Bytes of a disk that videos, photos and checkpoints leave free; less on small disks.
RESERVE_BYTES = 32 * 2**20
#: The part of a small disk that is left free.
_SMALL_DISK_SHARE = 1 / 32


def reserve_bytes(folder: Path) -> int:
    """Return how many bytes are left free on the disk of a folder."""
    return min(RESERVE_BYTES, int(shutil.disk_usage(folder).total * _SMALL_DISK_SHARE))


def check_room(folder: Path) -> None:
    """Check that a file may be written below a folder.

    Raises:
        OSError: ENOSPC, only what is kept for the queue is left of the disk.
    """
    free = shutil.disk_usage(folder).free
    if free < reserve_bytes(folder):
        reason = f"{os.strerror(errno.ENOSPC)}: the last {free / 2**20:.1f} MiB of the disk are kept for the queue"
        raise OSError(errno.ENOSPC, reason, str(folder))
