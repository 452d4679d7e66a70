"""`svdq` in processes that are forks of one that has imported it: each saves half a second of a core."""

import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import svdq.cli
import svdq.producer
from tests.waiting import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        module.name
        for package in (svdq.cli, svdq.producer)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    ]
)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork obeys these variables: Python and libraries read some only at their start."""
    return all(name.startswith("SVDQ_") for name in environment)


class Fork:
    """A running `svdq`, with the methods of `subprocess.Popen` that tests use."""

    #: multiprocessing reads each end once, in whichever thread comes first.
    _lock = threading.Lock()

    def __init__(
        self,
        arguments: Sequence[str],
        stdout: Path,
        stderr: Path,
        *,
        folder: Path | None = None,
        warn: bool = True,
        **environment: str,
    ) -> None:
        """Start it in `folder`, or in this one; it appends what it prints to two files, or to one.

        Warnings are errors unless `warn`.
        """
        given = (list(arguments), folder or Path.cwd(), {**os.environ, **environment}, stdout, stderr, warn)
        with self._lock:
            self._process = _CONTEXT.Process(target=_run, args=given)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("svdq", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*arguments: str, folder: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `svdq` to its end; warnings are errors."""
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = Path(outputs, "stdout"), Path(outputs, "stderr")
        fork = Fork(arguments, stdout, stderr, folder=folder, warn=False, **environment)
        try:
            code = fork.wait()
        finally:
            fork.kill()
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def _run(
    arguments: list[str], folder: Path, environment: dict[str, str], stdout: Path, stderr: Path, warn: bool
) -> None:
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if not warn:
        warnings.simplefilter("error")
    sys.argv = ["svdq", *arguments]
    from svdq.cli.main import main

    main()
