"""The embedded Redis server of a campaign as a process that is killed, paused and started again."""

import os
import signal
import time
from pathlib import Path

import psutil

from svdq.producer.embedded_redis import PID, ensure_server, stop_server
from tests.waiting import wait_until


class RedisProcess:
    """The server of one home: Valkey or Redis, append-only."""

    def __init__(self, home: Path) -> None:
        """Start it."""
        self._home = home
        self.url = ensure_server(home)

    @property
    def pid(self) -> int:
        """Its process id; checked to be this home's server, since it will be killed."""
        pid = int((self._home / "redis" / PID).read_text())
        assert Path(psutil.Process(pid).cwd()) == (self._home / "redis").resolve(), f"{pid} is not our server"
        return pid

    def kill(self) -> None:
        """End it with kill -9."""
        process = psutil.Process(self.pid)
        process.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "Redis ends")

    def start(self) -> None:
        """Start it again from its append-only file."""
        assert ensure_server(self._home) == self.url

    def pause(self, seconds: float) -> None:
        """Let it answer nobody for a while."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it in order."""
        stop_server(self._home)
