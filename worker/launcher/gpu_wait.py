"""Decides whether ranks wait for memory of their GPUs that other programs hold. Does not import torch."""

import math
import threading
import time
from collections.abc import Sequence
from typing import Final

from svdq.pipeline.models.compute.memory import size_text
from svdq.worker.launcher.gpu_users import LEAST_BYTES, GpuMemory, memory_by_user

AGAIN_S: Final = 5.0  # seconds for which an answer counts


class MemoryWatch:
    """Asks for the memory of some GPUs in a thread, since NVIDIA's tool may take seconds or hang."""

    def __init__(self, devices: Sequence[str], need: int, ranks_per_gpu: int) -> None:
        """Ask nothing yet; the arguments are those of `lack_of_memory`."""
        self.devices: Sequence[str] = devices
        self._need = need
        self._ranks_per_gpu = ranks_per_gpu
        self._thread: threading.Thread | None = None
        self._found, self._found_at = "", -math.inf

    def want(self, need: int) -> None:
        """Have a rank need more from now on, if it is more, and ask anew."""
        self._need, self._found_at = max(self._need, need), -math.inf

    def lack(self) -> str | None:
        """Return what `lack_of_memory` said a short time ago; None while that is not known."""
        if not self._need or time.monotonic() - self._found_at < AGAIN_S:
            return self._found
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.look, name="memory", daemon=True)
            self._thread.start()
        return None

    def look(self) -> str:
        """Wait for the answer of `lack_of_memory`, and return it."""
        need = self._need
        found = lack_of_memory(self.devices, need, self._ranks_per_gpu)
        if need == self._need:
            self._found, self._found_at = found, time.monotonic()
        return found


def lack_of_memory(devices: Sequence[str], need: int, ranks_per_gpu: int) -> str:
    """Return which GPU has too little free memory and who holds it, as a clause; "" if none has.

    `need` is the bytes for a rank; `devices` are as in CUDA_VISIBLE_DEVICES. Only another program's memory counts:
    what ranks that have ended hold comes back by itself, and a GPU that is too small stays so.
    """
    for memory in memory_by_user() if need else ():
        if {memory.number, memory.uuid} & {*devices} and (holders := _holders(memory, ranks_per_gpu)):
            wanted = need * ranks_per_gpu
            if memory.free_bytes + memory.svdq_bytes < wanted <= memory.total_bytes:
                return (
                    f"GPU {memory.number} has {size_text(memory.free_bytes)} of {size_text(memory.total_bytes)} free, "
                    f"of {size_text(wanted)} that the model needs: {holders}"
                )
    return ""


def _holders(memory: GpuMemory, ranks_per_gpu: int) -> str:
    """Name the other programs that hold much memory of a GPU; "" if there are none."""
    if memory.users:
        return " and ".join(map(str, memory.users))
    # Beside other ranks, they may be svdq's own.
    if memory.is_listed or ranks_per_gpu > 1 or memory.total_bytes - memory.free_bytes < LEAST_BYTES:
        return ""
    return "another program holds the rest"
