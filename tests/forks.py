"""`svdq` in processes that are forks of one that has imported it: each saves half a second of a core."""

import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import PATIENCE_S

_starting = threading.Lock()
_servers: list[str] = []


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork obeys these variables: Python and libraries read some only at their start."""
    return all(name.startswith(("SVDQ_", "_SVDQ_", "COMP_", "AWS_")) for name in environment)


class Fork:
    """A running `svdq`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[str],
        stdout: Path,
        stderr: Path,
        *,
        stdin: Path = Path(os.devnull),
        folder: Path | None = None,
        warn: bool = True,
        **environment: str,
    ) -> None:
        """Start it in `folder`, or in this one; it appends what it prints to two files, or to one.

        Warnings are errors unless `warn`.
        """
        request = {
            "arguments": list(arguments),
            "folder": str(folder or Path.cwd()),
            "environment": {**os.environ, **environment},
            "input": str(stdin),
            "outputs": [str(stdout), str(stderr)],
            "warn": warn,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._read()
        self._code: int | None = None
        self._lock = threading.Lock()

    def _read(self) -> int:
        (number,) = struct.unpack("!q", self._connection.recv(8, socket.MSG_WAITALL))
        return int(number)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float = PATIENCE_S) -> int:
        with self._lock:
            if self._code is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("svdq", timeout)
                self._code = self._read()
                self._connection.close()
            return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Piped(Fork):
    """A running `svdq` whose outputs are pipes, which a test reads as it goes; killed at the end of a block."""

    def __init__(self, *arguments: object, stdin: Path = Path(os.devnull), **environment: str) -> None:
        pipes = os.pipe(), os.pipe()
        for _, write in pipes:
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)  # so that a command soon waits for a reader
        stdout, stderr = (Path(f"/proc/{os.getpid()}/fd/{write}") for _, write in pipes)
        super().__init__([str(word) for word in arguments], stdout, stderr, stdin=stdin, warn=False, **environment)
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in pipes)

    def __enter__(self) -> "Piped":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


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


def _server() -> str:
    """Return the address of the server of this process, started at the first use."""
    with _starting:
        if not _servers:
            folder = tempfile.mkdtemp(prefix="svdq-forks-", dir="/tmp")
            address = f"{folder}/socket"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                program = Path(__file__).with_name("fork_server.py")
                process = subprocess.Popen(
                    [sys.executable, "-P", str(program), str(listener.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            atexit.register(_stop, process, folder)
            _servers.append(address)
        return _servers[0]


def _stop(process: "subprocess.Popen[bytes]", folder: str) -> None:
    process.communicate()
    shutil.rmtree(folder)
