"""A small supervisor that runs units as systemd would, for tests where there is no systemd."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from svdq.cli.main import cli
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


class Unit:
    """One service: what its file says, and the processes that were started by it.

    A stand-in for systemd in what our units use: environment, readiness, the main process, SIGTERM, and SIGKILL for
    what is left when the time is over or the main process has ended. It finds the unit's processes by a variable in
    their environment instead of a control group.
    """

    def __init__(self, path: Path, config: Path, log: Path) -> None:
        drop_ins = sorted(path.parent.glob("svdq-.service.d/*")) + sorted(path.parent.glob(f"{path.name}.d/*"))
        self.lines = [
            tuple(line.split("=", 1))
            for file in (path, *drop_ins)
            for line in file.read_text().splitlines()
            if "=" in line and not line.startswith("#")
        ]
        self._config = config
        self._log = log
        self._invocation = ""
        self._main: psutil.Process | None = None

    def all(self, name: str) -> list[str]:
        """Values of a setting; specifiers are replaced."""
        return [value.replace("%E", str(self._config)) for found, value in self.lines if found == name]

    def one(self, name: str) -> str:
        """The value of a setting that occurs once."""
        [value] = self.all(name)
        return value

    def environment(self) -> dict[str, str]:
        """The environment of its processes: nothing of ours but the variables that every program needs."""
        found = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        found["INVOCATION_ID"] = self._invocation
        for value in self.all("EnvironmentFile"):
            path = Path(value.removeprefix("-"))
            if path.exists() or not value.startswith("-"):
                found |= dict(setting.split("=", 1) for setting in shlex.split(path.read_text()))
        return found

    def command(self, line: str) -> list[str]:
        """The words of a command: `${NAME}` becomes one word, `$NAME` those of the value."""
        environment, words = self.environment(), []
        for word in shlex.split(line.lstrip("+-")):
            if word.startswith("$") and not word.startswith("${"):
                words += shlex.split(environment.get(word[1:], ""))
            else:
                words.append(re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), word))
        return words

    def start(self) -> None:
        """Start it, and wait until it is up in the way that its `Type` says."""
        self._invocation = uuid.uuid4().hex
        for command in self.all("ExecStartPre"):
            subprocess.run(self.command(command), env=self.environment(), check=True, timeout=PATIENCE_S)
        command = self.command(self.one("ExecStart"))
        before = set(psutil.pids())
        match self.one("Type"):
            case "forking":
                subprocess.run(command, env=self.environment(), check=True, timeout=PATIENCE_S)
                pid_file = Path(self.environment()["SVDQ_HOME"], "redis", "redis.pid")
                self._main = psutil.Process(int(pid_file.read_text()))
                # systemd refuses a main process that is not of the unit, such as one that ran before.
                assert self._main.pid not in before
            case "notify":
                path = self._log.with_suffix(".notify")
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                    manager.bind(str(path))
                    manager.settimeout(PATIENCE_S)
                    self._popen(command, {"NOTIFY_SOCKET": str(path)})
                    assert manager.recv(100) == b"READY=1"
                path.unlink()
            case "exec" | "oneshot":
                self._popen(command, {})

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Wait for the end of the main process; end what is left of the unit; return the exit code if it is known."""
        assert self._main is not None
        code = self._main.wait(timeout_s)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        return code

    def stop(self) -> int | None:
        """Stop it as `systemctl stop` does; a main process that outlives `TimeoutStopSec` is an error here."""
        assert self._main is not None
        for process in [self._main] if self.all("KillMode") == ["mixed"] else self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
        return self.wait(float(self.one("TimeoutStopSec")))

    def processes(self) -> list[psutil.Process]:
        """The unit's processes, in the sense of a control group."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # A Redis server writes its title over its environment.
                if process == self._main or process.environ().get("INVOCATION_ID") == self._invocation:
                    found.append(process)
        return found

    def said(self) -> str:
        """The text of its journal."""
        return self._log.read_text()

    def _popen(self, command: list[str], more: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            environment = {**self.environment(), **more}
            self._main = psutil.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[[Path], Unit]]:
    """Make a unit of its file; `<tmp_path>/config` is what systemd calls %E. What still runs at the end is killed."""
    units: list[Unit] = []

    def make(path: Path) -> Unit:
        units.append(Unit(path, tmp_path / "config", tmp_path / f"{path.name}.log"))
        return units[-1]

    yield make
    for unit in units:
        for process in unit.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def check_command() -> Callable[[list[str]], None]:
    """Assert that a command line of svdq is one: a command that there is, with options that it has."""

    def check(words: list[str]) -> None:
        command, context = cli, cli.make_context("svdq", [], resilient_parsing=True)
        while hasattr(command, "get_command"):
            if command.invoke_without_command and (not words or words[0].startswith("-")):
                break  # such as `svdq serve`
            name, *words = words
            found = command.get_command(context, name)
            assert found is not None, name
            command = found
        command.make_context(str(command.name), list(words), parent=context)

    return check
