"""One group of ranks as a process: a torchrun, what is asked of it, and its end. Knows no jobs; imports no torch.

torchrun runs in a session of its own, so that Ctrl-C in the terminal reaches the launcher only, and restarts the group
when a rank dies. Over several hosts it may give up when another one is lost, and is started again here.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from svdq.producer.keys import DAY_S
from svdq.producer.settings import Settings
from svdq.worker.launcher import rundir
from svdq.worker.launcher.hosts import Hosts

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger(__name__)

#: How often torchrun restarts a group before it gives up: a rank that dies once a minute keeps a night going.
MAX_RESTARTS = 1000
#: Seconds from the start of a torchrun until another one is started, where a group is over several hosts.
RESTART_S = 5.0
#: Seconds that what is left of a group gets to disappear.
KILL_S = 5.0
#: Seconds between looks at what is being killed.
POLL_S = 0.1


class GroupProcess:
    """A running torchrun."""

    def __init__(
        self,
        settings: Settings,
        ranks: int,
        options: Sequence[str],
        run_dir: Path,
        devices: Sequence[str] | None,
        hosts: Hosts | None = None,
    ) -> None:
        """Start it.

        Args:
            settings: what the ranks get to see as their settings.
            ranks: K; of a group over several hosts those of this one.
            options: the ranks' command line.
            run_dir: an existing folder that is this group's alone.
            devices: the GPUs it may see, by names of CUDA_VISIBLE_DEVICES; None: those of this process.
            hosts: those of a group over several; None: this one.
        """
        self._run_dir = run_dir
        #: K; of a group over several hosts those of this one.
        self.num_ranks = ranks
        self._hosts = hosts
        self._told: set[tuple[int, signal.Signals]] = set()
        #: What it was told last.
        self._wish: signal.Signals | None = None
        rendezvous = hosts.torchrun_options() if hosts else _on_one_host(run_dir)
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks)]
        # Without --log-dir torchrun leaves an empty folder in TMPDIR at each start.
        command += ["--max-restarts", str(MAX_RESTARTS), "--log-dir", str(run_dir / "torchrun")]
        command += ["-m", "svdq.worker", *options, "--run-dir", str(run_dir)]
        self._command = command
        # Else torchrun opens a TCP port for its ranks, at all addresses, that ours do not use.
        self._environment = {**environment_of(settings), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._environment |= hosts.environment() if hosts else {}
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True, preexec_fn=die_with_parent()
        )

    def poll(self) -> int | None:
        """Give its exit code, or None while it runs.

        Raises:
            SvdqError: a rank has said why the group cannot run; what is left of it is ended.
        """
        error = rundir.read_error(self._run_dir)
        if error is not None:
            # A model that is not there is not mended by restarts.
            self.kill()
            raise error
        code = self._process.poll()
        return code if self._hosts is None else self._among_hosts(code)

    def _among_hosts(self, code: int | None) -> int | None:
        """Bridge what torchrun leaves open when hosts of a group come and go; takes and returns what `poll` gives."""
        if self._wish is signal.SIGTERM and code is None and not self.running_pids():
            self.kill()  # it would wait for minutes for those of the other hosts to end as well
            return 0
        if not code or self._wish is not None:
            return code
        if time.monotonic() >= self._started_at + RESTART_S:
            logger.warning("torchrun ended with code %d: another host is lost. It waits for the hosts anew.", code)
            self.kill()  # ranks that it may have left
            self._start()
        return None

    @property
    def is_running(self) -> bool:
        """Whether it had not ended when `poll` looked last."""
        return self._process.returncode is None

    @property
    def is_ready(self) -> bool:
        """Whether it has been ready for jobs."""
        return rundir.is_ready(self._run_dir)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that listen or listened, by rank; those of a restart, too."""
        return rundir.read_pids(self._run_dir)

    def running_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that listen, by rank; those of a restart, too."""
        return rundir.running_pids(self._run_dir)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that listens and has not had it: those of a restart, too."""
        self._wish = number
        for pid in self.running_pids().values():
            if (pid, number) not in self._told:
                self._told.add((pid, number))
                _signal(pid, number)

    def kill(self) -> None:
        """End whatever is left of the group, ranks without a parent included; its jobs are taken again by the next."""
        deadline = time.monotonic() + KILL_S
        while (left := self._left()) and time.monotonic() < deadline:
            for process in left:
                _signal(process.pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(POLL_S)
        self._process.wait()

    def _left(self) -> "list[psutil.Process]":
        """Find torchrun and its ranks by what they were started with: the run folder is theirs alone."""
        import psutil  # on demand: only what a worker needs has it

        run_dir = str(self._run_dir)
        return [process for process in psutil.process_iter(["cmdline"]) if run_dir in (process.info["cmdline"] or ())]


def _on_one_host(run_dir: Path) -> list[str]:
    """Give torchrun's options for a rendezvous through a file: what torchrun reads there it unpickles.

    The run folder keeps everybody else away from it, which nothing does for torchrun's TCP store.
    """
    # The file grows with each sign of life of the only host there is.
    conf = f"store_type=file,keep_alive_interval={DAY_S}"
    return [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(run_dir / "store"), "--rdzv-conf", conf),
        *("--rdzv-id", "svdq", "--local-addr", "127.0.0.1"),
    ]


def environment_of(settings: Settings) -> dict[str, str]:
    """Make the environment in which a process has the settings of this one, flags included, and one thread."""
    environment = {
        **os.environ,
        "SVDQ_HOME": str(settings.home),
        "SVDQ_STORAGE": settings.storage,
        "SVDQ_MODEL": settings.model,
        "SVDQ_MAX_PIXELS": str(settings.max_pixels),
        "SVDQ_MAX_ATTEMPTS": str(settings.max_attempts),
        "SVDQ_STALL_S": str(settings.stall_s),
        "SVDQ_MEMORY_LIMIT": str(settings.memory_limit or ""),
        # Empty counts as not set: the embedded server.
        "SVDQ_REDIS_URL": settings.redis_url or "",
    }
    # Else the folder that the user is in comes first where `python -m` looks for modules: a redis.py there would run.
    environment["PYTHONSAFEPATH"] = "1"
    # Unset, torchrun sets it with a warning; our ranks set their threads themselves.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _signal(pid: int, number: signal.Signals) -> None:
    # PermissionError: the rank is gone, and someone else's process has its number now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def die_with_parent() -> Callable[[], None] | None:
    """Give what a child of this process runs first, so that the kernel sends it SIGTERM when this process is killed.

    None where the kernel cannot do that.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        pr_set_pdeathsig = 1
        prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before the kernel was asked
            os._exit(1)

    return ask_kernel
