"""Watches the GPUs of a group: tests them, and decides whether ranks wait for memory that other programs hold.

Does not import torch.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import psutil

from svdq.pipeline.models.compute.memory import size_text
from svdq.worker.launcher.gpu_users import LEAST_BYTES, GpuMemory, memory_by_user
from svdq.worker.launcher.gpus import probe

STUCK_S: Final = 60.0  # seconds that a rank waits in its kernel until GPUs are tested
LOOK_S: Final = 5.0  # seconds between two looks at that
AGAIN_S: Final = 5.0  # seconds for which an answer counts


class GpuProbes:
    """Computes a little on each GPU when ranks have died or hang, in threads: a broken one may take long to answer."""

    def __init__(self, devices: Sequence[str], running_pids: Callable[[], Mapping[int, int]]) -> None:
        """Test nothing yet; `devices` are as in CUDA_VISIBLE_DEVICES, `running_pids` returns those of the ranks."""
        self._devices = devices
        self._running_pids = running_pids
        self._reasons: dict[str, str] | None = None  # during a test, why each GPU failed, or ""
        self._waiting: dict[int, float] = {}  # process ids of ranks that wait in the kernel, and since when
        self._look_at = 0.0

    def failed(self, *, is_due: bool) -> Mapping[str, str] | None:
        """Return why GPUs have failed, by GPU, the same until `end`; None while a test runs, and if there is none.

        A test begins when it `is_due`, or when a rank hangs.
        """
        if self._reasons is None:
            if not is_due and not self._is_stuck():
                return None
            self._reasons = {}
            for device in self._devices:
                threading.Thread(target=_test, args=(device, self._reasons), name="probe", daemon=True).start()
        if len(self._reasons) < len(self._devices):
            return None
        return {device: reason for device, reason in self._reasons.items() if reason}

    def end(self) -> None:
        """Forget the test and the ranks that wait."""
        self._reasons, self._waiting = None, {}

    def _is_stuck(self) -> bool:
        """Whether a rank has waited in the kernel for a while: no signal ends it, so torchrun notices nothing."""
        now = time.monotonic()
        if not self._devices or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        self._waiting = {pid: self._waiting.get(pid, now) for pid in self._running_pids().values() if _waits(pid)}
        return any(now - since >= STUCK_S for since in self._waiting.values())


def _test(device: str, reasons: dict[str, str]) -> None:
    reasons[device] = probe(device)


def _waits(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP)
    except psutil.Error:
        return False


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
