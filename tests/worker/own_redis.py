"""A Redis server that a user runs by themselves, on a port of the loopback: to be stopped, killed and started again."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from svdq.producer.embedded_redis import find_server
from tests.waiting import wait_until


class OwnRedis:
    """One server with its data in a folder of its own, append-only."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        """Start it.

        Args:
            folder: an existing, empty one.
            options: more of the server's own, such as "--requirepass", "x".
            tls: speak TLS only; the certificate is among the options.
        """
        self._early, self._log = folder / "start.log", folder / "redis.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        kept = ("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction")
        program = shutil.which("valkey-server") or shutil.which("redis-server") or str(find_server())
        self._command = [
            *(program, "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--logfile", str(self._log), *ports, *kept, *options),
        ]
        self.start()

    def said(self) -> str:
        """Its output, before it had read its options and after."""
        return "".join(path.read_text() for path in (self._early, self._log) if path.exists())

    def start(self) -> None:
        """Start it, with the data of before, and wait until it answers on its port, loaded or not."""
        with self._early.open("wb") as early:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=early, stderr=subprocess.STDOUT
            )
        wait_until(lambda: self._process.poll() is not None or self._listens(), self.said)
        assert self._process.poll() is None, self.said()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with a signal and wait until it is gone."""
        self._process.send_signal(number)
        self._process.wait()

    def url(self, user: str = "", scheme: str = "redis", query: str = "") -> str:
        """Give its address, for a user such as `name:password`."""
        return f"{scheme}://{user}{'@' if user else ''}127.0.0.1:{self.port}/0{query}"

    def client(self, url: str) -> redis.Redis:
        """Connect and wait until the data is loaded."""
        connection = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0))

        def is_loaded() -> bool:
            try:
                return bool(connection.ping())
            except redis.exceptions.BusyLoadingError:
                return False

        wait_until(is_loaded)
        return connection

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True
