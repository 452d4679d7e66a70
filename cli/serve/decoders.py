"""The processes that decode photos for the server, shared among tokens."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import anyio
import anyio.to_thread

from svdq.producer.decoder import Decoder

T = TypeVar("T")

NUM_DECODERS, PER_TOKEN = 3, 2  # processes, and how many of them one token may use at a time
#: Bytes of a file, and of memory that decoding takes, above which photos are decoded one at a time.
LARGE_FILE_BYTES = 1 << 24
LARGE_DECODED_BYTES = 1 << 27


class Decoders:
    """Runs work with decoders in threads of their own; others wait, those of the same token behind each other."""

    def __init__(self) -> None:
        self._large = threading.RLock()
        self._decoder = Decoder(lambda num_bytes: self._alone(num_bytes > LARGE_DECODED_BYTES))
        self._all = anyio.CapacityLimiter(NUM_DECODERS)
        self._by_owner: dict[str, anyio.CapacityLimiter] = {}

    async def run(self, owner: str, num_bytes: int, work: Callable[[Decoder], T]) -> T:
        """Run work that decodes a photo of so many bytes, for the token with this name."""

        def work_in_turn() -> T:
            with self._alone(num_bytes > LARGE_FILE_BYTES):
                return work(self._decoder)

        async with self._by_owner.setdefault(owner, anyio.CapacityLimiter(PER_TOKEN)):
            return await anyio.to_thread.run_sync(work_in_turn, limiter=self._all)

    def _alone(self, is_large: bool) -> AbstractContextManager[object]:
        return self._large if is_large else nullcontext()
