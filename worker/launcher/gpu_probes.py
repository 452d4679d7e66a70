"""Tests the GPUs of a group whose ranks have died or hang. Does not import torch."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import psutil

from svdq.worker.launcher.gpus import probe

STUCK_S: Final = 60.0  # seconds that a rank waits in its kernel until GPUs are tested
LOOK_S: Final = 5.0  # seconds between two looks at that


class GpuProbes:
    """Computes a little on each GPU, in threads, since one that has failed may take long to answer."""

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
