"""Counts what is renamed into a folder, by the kernel's own account (inotify, Linux)."""

import ctypes
import os
import struct
from collections import Counter
from pathlib import Path

_IN_MOVED_TO = 0x80
_IN_Q_OVERFLOW = 0x4000
#: Of `struct inotify_event`, before the name.
_HEADER = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 20


class Publications:
    """How often each name has appeared in a folder by a rename: the only way in which videos are published."""

    def __init__(self, folder: Path) -> None:
        """Begin to count; the folder must be there."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._file, os.fsencode(folder), _IN_MOVED_TO)
        if self._file < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot be used", str(folder))
        self._counts: Counter[str] = Counter()

    def counts(self) -> Counter[str]:
        """Give the count of each name so far; to be called now and then, for the kernel keeps 16,384 events."""
        while True:
            try:
                events = os.read(self._file, _BUFFER_BYTES)
            except BlockingIOError:
                return self._counts
            position = 0
            while position < len(events):
                _, mask, _, length = _HEADER.unpack_from(events, position)
                assert not mask & _IN_Q_OVERFLOW, "renames were missed: ask for the counts more often"
                position += _HEADER.size
                self._counts[os.fsdecode(events[position : position + length].rstrip(b"\0"))] += 1
                position += length

    def close(self) -> None:
        """Count no more."""
        os.close(self._file)
