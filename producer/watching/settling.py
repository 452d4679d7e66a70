"""Waiting for files to stop growing: which have not changed for long enough. Pure: no clock and no files of its own."""

import heapq
from dataclasses import dataclass
from typing import NamedTuple


class Signature(NamedTuple):
    """What tells that a file is the same as when it was last looked at.

    The inode is none of it: file systems of memory cards and some network shares number their files anew.
    """

    #: Bytes.
    size: int
    #: When it was last written, in nanoseconds.
    mtime_ns: int


@dataclass(kw_only=True)
class _Waiting:
    signature: Signature
    #: When it was first seen as it is now, and when it is to be looked at next.
    since_s: float
    due_s: float


class Settling:
    """Files that were seen and are not done with. Times are seconds of any one clock."""

    def __init__(self, settle_s: float) -> None:
        """Make it empty.

        Args:
            settle_s: seconds without a change after which a file is due.
        """
        self._settle_s = settle_s
        self._files: dict[str, _Waiting] = {}
        #: Every `due_s` that was ever set; those that no longer hold are passed over.
        self._queue: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._files)

    def see(self, path: str, signature: Signature, now_s: float) -> None:
        """Take note of how a file is now; when that is new, it has `settle_s` to go."""
        file = self._files.get(path)
        if file is None or file.signature != signature:
            due_s = now_s + self._settle_s
            self._files[path] = _Waiting(signature=signature, since_s=now_s, due_s=due_s)
            heapq.heappush(self._queue, (due_s, path))

    def forget(self, path: str) -> None:
        """Wait for a file no longer."""
        self._files.pop(path, None)

    def next_due(self, now_s: float) -> str | None:
        """Return the file that is due longest, or None; it stays due until it is seen changed, put off or forgotten."""
        while self._queue and self._queue[0][0] <= now_s:
            due_s, path = self._queue[0]
            file = self._files.get(path)
            if file is not None and file.due_s == due_s:
                return path
            heapq.heappop(self._queue)
        return None

    def put_off(self, path: str, until_s: float) -> None:
        """Have a file that is waited for be due at another time, if it does not change before."""
        file = self._files[path]
        file.due_s = until_s
        heapq.heappush(self._queue, (until_s, path))

    def signature(self, path: str) -> Signature:
        """How a file that is waited for was last seen."""
        return self._files[path].signature

    def unchanged_s(self, path: str, now_s: float) -> float:
        """Seconds for which a file that is waited for has been as it is."""
        return now_s - self._files[path].since_s
