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

SVDQ = str(Path(sys.executable).with_name("svdq"))
STOP_S = 20.0  # seconds that a stop may take: as systemd and Kubernetes grant
#: A line of rank 0 when its group can work; once in each life of the group.
READY = "Ready with"
RANK = "svdq rank "  # the name of a rank's process, before its number


class Group:
    """A launcher, the torchrun under it, and the ranks under that."""

    def __init__(
        self,
        options: Sequence[object],
        log: Path,
        folder: Path,
        environment: Mapping[str, str],
        under: Sequence[str] = (),
    ) -> None:
        """Start it on the processor in a folder; `under` is a command that becomes it."""
        self.log = log
        command = [*under, SVDQ, "worker", "--device", "cpu", *map(str, options)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment
            )

    @property
    def text(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        """Whether the launcher has not ended."""
        return self.process.poll() is None

    def ready(self, times: int = 1) -> "Group":
        """Wait until it takes jobs, or takes them again."""
        wait_until(lambda: self.text.count(READY) >= times or not self.runs, lambda: self.text)
        assert self.runs, self.text
        return self

    def family(self) -> list[psutil.Process]:
        """All its processes: launcher, torchrun, ranks and their children."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, rank 0 first; fewer while it is started again."""
        found: dict[int, psutil.Process] = {}
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                # Before it becomes ffmpeg, a child of a rank looks like the rank, which comes first.
                if process.name().startswith(RANK):
                    found.setdefault(int(process.name().removeprefix(RANK)), process)
        return [process for _, process in sorted(found.items())]

    # Faults.

    def kill_rank(self, rng: Random) -> None:
        """kill -9 of one rank."""
        rng.choice(wait_until(self.ranks, "there is a rank to kill")).kill()

    def kill_launcher(self) -> None:
        """kill -9 of the launcher alone; returns when nothing of its family is left."""
        family = self.family()
        self.process.kill()
        self._bury(family)

    def kill_all(self) -> None:
        """kill -9 of launcher, torchrun and ranks at once, as in a power cut; returns when they are gone."""
        family = self.family()
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for process in family:
                with contextlib.suppress(psutil.Error):
                    act(process)
        self._bury(family)

    def pause(self) -> None:
        """SIGSTOP to all its processes, the launcher first, so that nobody notices anybody's absence."""
        self._signal_all(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT to all its processes."""
        self._signal_all(signal.SIGCONT)

    # Ends in order.

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone, as a terminal's Ctrl-C or an init system does."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        wait_until(lambda: not self.runs, lambda: self.text)
        return self.process.returncode

    def stop(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal to the launcher, and wait; return exit code and seconds."""
        family = self.family()
        began_at = time.monotonic()
        self.send_signal(number)
        code, took_s = self.end(), time.monotonic() - began_at
        self._bury(family)
        return code, took_s

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _bury(self, family: Sequence[psutil.Process]) -> None:
        self.process.wait()
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        alive = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"processes outlive their group: {alive}"
