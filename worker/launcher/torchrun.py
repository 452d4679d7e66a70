"""A torchrun with its ranks, as processes: starts, signals and kills them. Does not import torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from svdq.producer.keys import DAY_S
from svdq.producer.processes import die_with_parent
from svdq.worker import run_folder
from svdq.worker.config import RunConfig, private_environment, write_config
from svdq.worker.launcher.gpus import GPUS_BY_BUS

MAX_RESTARTS = 3000  # about twelve hours of waiting for a model or a disk
KILL_S = 5.0  # seconds that killed processes get to disappear

#: glibc's variables with which processes keep the memory that they free, for the next step: on a virtual machine the
#: first touch of a page takes up to 10 us, half the time of a convolution.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}


def environment(config: RunConfig, *, on_gpus: bool) -> dict[str, str]:
    """Return the environment of torchrun and its ranks; those on GPUs compute in no host memory, and free experts."""
    return (
        (GPUS_BY_BUS if on_gpus else KEEP_FREED_MEMORY)
        | os.environ
        | {
            # Without it `python -m` looks for modules in the current folder first, and runs a redis.py there.
            "PYTHONSAFEPATH": "1",
            # torchrun sets it with a warning; the ranks set their threads themselves.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Without it torchrun opens a TCP port at all addresses, which these ranks do not use.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **private_environment(config.settings),
        }
    )


class Torchrun:
    """A torchrun, which starts its ranks again when one dies."""

    def __init__(
        self, run_dir: Path, config: RunConfig, num_ranks: int, devices: Sequence[str] | None, *, was_ready: bool
    ) -> None:
        """Start it, with a new run folder; `devices` are as in CUDA_VISIBLE_DEVICES, or None: inherited.

        Ranks that cannot start try again if the group `was_ready` for jobs before.
        """
        self.run_dir = run_dir
        self.started_at = time.time()  # seconds since the epoch
        self._sent: set[tuple[int, signal.Signals]] = set()
        run_dir.mkdir()
        write_config(run_dir, config)
        if was_ready:
            run_folder.write_ready(run_dir, -1)
        variables = environment(config, on_gpus=devices is not None)
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        command = [sys.executable, "-u", "-m", "svdq.worker.agent", "--nproc-per-node", str(num_ranks)]
        # torchrun unpickles the contents of its rendezvous: a file, which only this user can open. Its TCP store is
        # open to all. The file grows with each keep-alive of the only host.
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(run_dir / "store"), "--rdzv-id", "svdq"]
        command += ["--rdzv-conf", f"store_type=file,keep_alive_interval={DAY_S}", "--local-addr", "127.0.0.1"]
        # Without --log-dir torchrun leaves an empty folder in TMPDIR at each start.
        command += ["--max-restarts", str(MAX_RESTARTS), "--log-dir", str(run_dir / "torchrun")]
        self._process = subprocess.Popen(
            [*command, "-m", "svdq.worker", "--run-dir", str(run_dir)],
            env=variables,
            start_new_session=True,
            # The end of torchrun stops its ranks; it does not end by SIGTERM.
            preexec_fn=die_with_parent(signal.SIGKILL),
        )

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether it ran at the last `poll`."""
        return self._process.returncode is None

    @property
    def is_starting(self) -> bool:
        """Whether its ranks are not ready for jobs yet, or again."""
        ready = run_folder.last_ready(self.run_dir)
        return ready is None or ready < run_folder.restarts(self.run_dir)

    def running_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that handle signals, by rank, also after a restart."""
        return run_folder.running_pids(self.run_dir)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal once to every rank that handles signals; call this again to reach later ones."""
        for pid in self.running_pids().values():
            if (pid, number) not in self._sent:
                self._sent.add((pid, number))
                _signal(pid, number)

    def kill(self) -> None:
        """Kill what is left of it, orphaned ranks included; other groups take over its jobs."""
        deadline = time.monotonic() + KILL_S
        while (left := self._left()) and time.monotonic() < deadline:
            for process in left:
                _signal(process.pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.1)
        self._process.wait()

    def _left(self) -> list[psutil.Process]:
        run_dir = str(self.run_dir)
        return [process for process in psutil.process_iter(["cmdline"]) if run_dir in (process.info["cmdline"] or ())]


def _signal(pid: int, number: signal.Signals) -> None:
    # PermissionError: the rank has ended, and another user's process has its id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
