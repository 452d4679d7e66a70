"""The samples that wait on a rank for its stage loop, in host memory, and those without units to warm up for."""

import heapq
import itertools
import threading
from typing import Final

from svdq.pipeline.loop.sample import Sample

#: Samples that may wait, and bytes of their tensors; one sample may wait whatever its size.
MAX_SAMPLES: Final = 8
MAX_BYTES: Final = 256 * 2**20


class Inbox:
    """The work that has arrived on a rank and is not begun.

    `put` blocks while it is full. The receiving thread then receives nothing more, so the ranks before this one have
    to wait, up to rank 0, which takes no more jobs. This cannot deadlock. The stage loop takes whatever has arrived
    and never waits for a certain sample, so a full inbox empties as soon as the loop can send what it has. It sends
    down the chain only. So whatever waits, waits for a later rank, and the last rank only for the sink, which waits for
    no rank: rank 0 receives its reports at all times.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int, Sample]] = []
        #: Keeps the order of arrival among equal indices: a warm-up before its sample.
        self._arrivals = itertools.count()
        self._num_bytes = 0
        self._closed = False
        self._released = False

    def put(self, work: Sample) -> None:
        """Add a sample, in any order, without waiting."""
        with self._changed:
            heapq.heappush(self._heap, (work.index, next(self._arrivals), work))
            self._num_bytes += sum(tensor.nbytes for tensor in work.tensors.values())
            self._changed.notify_all()

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait until a sample of so many bytes may be added; only one thread may."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._released
                    or not self._heap
                    or (len(self._heap) < MAX_SAMPLES and self._num_bytes + num_bytes <= MAX_BYTES)
                )
            )

    def take(self) -> Sample | None:
        """Wait for work and take the sample of the lowest index; None when no more comes, or after `release`."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._closed or self._released)
            if self._released or not self._heap:
                return None
            work = heapq.heappop(self._heap)[2]
            self._num_bytes -= sum(tensor.nbytes for tensor in work.tensors.values())
            self._changed.notify_all()
            return work

    def returned(self, sample: Sample, *, is_decoded: bool) -> Sample:
        """Take back a sample that `take` has given, after its units."""
        return sample

    def has_before(self, index: int) -> bool:
        """Whether work with a lower index waits."""
        with self._changed:
            return bool(self._heap) and self._heap[0][0] < index

    def close(self) -> None:
        """Have `take` return None when all is taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def release(self) -> None:
        """Have `take` return None at once, and unblock `wait_for_room`; for a rank that stops."""
        with self._changed:
            self._released = True
            self._changed.notify_all()
