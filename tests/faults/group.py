"""A running `svdq worker` and its process tree, to be killed, paused and stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import psutil

from tests.waiting import wait_until

#: Seconds that a stop may take: what systemd and Kubernetes are told to grant.
STOP_S = 20.0
#: What rank 0 says when its group can work; once in each life of the group.
READY = "Ready with"


class Group:
    """A launcher, the torchrun under it, and the ranks under that."""

    def __init__(
        self,
        ranks: int,
        log: Path,
        folder: Path,
        environment: Mapping[str, str],
        under: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """Start it.

        Args:
            ranks: K.
            log: where everything goes that it says.
            folder: its working folder.
            environment: its whole environment.
            under: a command that is given the launcher's, and becomes it.
            options: more options of the worker.
        """
        self._log = log
        with log.open("wb") as output:
            self._launcher = subprocess.Popen(
                [
                    *under,
                    sys.executable,
                    "-m",
                    "svdq.cli",
                    "worker",
                    "--device",
                    "cpu",
                    "--ranks",
                    str(ranks),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
            )

    @property
    def text(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        """Whether the launcher has not ended."""
        return self._launcher.poll() is None

    def ready(self) -> "Group":
        """Wait until it takes jobs."""
        wait_until(lambda: READY in self.text or not self.runs, "the worker is ready")
        assert self.runs, self.text
        return self

    def family(self) -> list[psutil.Process]:
        """All its processes: launcher, torchrun, ranks and what those have started."""
        launcher = psutil.Process(self._launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, rank 0 first; fewer while it is started again."""
        found: dict[int, psutil.Process] = {}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if "svdq.worker" in process.cmdline() and "--run-dir" in process.cmdline() and "RANK" in environment:
                    # Before it becomes ffmpeg, a child of a rank looks like the rank, which comes first.
                    found.setdefault(int(environment["RANK"]), process)
        return [process for _, process in sorted(found.items())]

    # Faults.

    def kill_rank(self, rng: Random) -> None:
        """kill -9 of one rank."""
        rng.choice(wait_until(self.ranks, "there is a rank to kill")).kill()

    def kill_launcher(self) -> None:
        """kill -9 of the launcher alone; returns when nothing of its family is left."""
        family = self.family()
        self._launcher.kill()
        self._bury(family)

    def kill_all(self) -> None:
        """kill -9 of launcher, torchrun and ranks at once, as in a power cut; returns when they are gone."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._bury(family)

    def pause(self) -> None:
        """SIGSTOP to all its processes, the launcher first, so that nobody notices anybody's absence."""
        self._signal_all(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT to all its processes."""
        self._signal_all(signal.SIGCONT)

    # Ends in order.

    def stop(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal to the launcher, as an init system does, and wait; return exit code and seconds."""
        family = self.family()
        began_at = time.monotonic()
        self._launcher.send_signal(number)
        wait_until(lambda: not self.runs, f"the worker ends on {number.name}")
        took_s = time.monotonic() - began_at
        self._bury(family)
        return self._launcher.returncode, took_s

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _bury(self, family: Sequence[psutil.Process]) -> None:
        self._launcher.wait()
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        alive = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"processes outlive their group: {alive}"
