"""Forks `svdq` off one that is imported: answers each connection with a process id and then with an exit code."""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import sys
import time
import warnings

import svdq.cli
import svdq.producer

gc.disable()
for package in (svdq.cli, svdq.producer):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
gc.freeze()
gc.enable()


def main() -> None:
    """Serve until stdin is closed; each fork leaves this function with a command to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    listener = socket.socket(fileno=int(sys.argv[1]))
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return run(connection)
        connection.close()


def run(connection: socket.socket) -> None:
    """Run a command in a fork, and report it."""
    with connection, connection.makefile() as lines:
        request = json.loads(lines.readline())
        # Before it is known to run: a test may then close its own ends of pipes and terminals.
        appended = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        stdin = os.open(request["input"], os.O_RDONLY)
        files = [stdin, *(os.open(path, appended, 0o600) for path in request["outputs"])]
        if (pid := os.fork()) != 0:
            for file in files:
                os.close(file)
            connection.sendall(struct.pack("!q", pid))
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("!q", os.waitstatus_to_exitcode(status)))
            os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # Those of the server remember what its outputs could do. Python keeps its own until the end, by their second names:
    # from 3.13 on it would say of another one that is dropped that its reader has gone.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    if not request["warn"]:
        warnings.simplefilter("error")
    sys.argv = ["svdq", *request["arguments"]]
    svdq.cli.main.main()


if __name__ == "__main__":  # ranks of a bench import this file, too
    main()
