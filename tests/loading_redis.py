"""A server that answers like a Redis that loads its data, then like one that has loaded it."""

import contextlib
import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def loading_redis(path: Path, num_loading: int) -> Iterator[list[bytes]]:
    """Listen at a unix socket; answer LOADING to so many pings, which are returned as they come."""
    pings: list[bytes] = []

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(65536):
                for command in re.findall(rb"\r\n(HELLO|CLIENT|SELECT|PING|INFO|EXISTS|HGETALL)\r\n", data):
                    self.request.sendall(self.answer(command) + b"\r\n")

        def answer(self, command: bytes) -> bytes:
            if command == b"INFO":
                return b"$19\r\nredis_version:7.2.0"
            if command in (b"EXISTS", b"HGETALL"):
                return b":0" if command == b"EXISTS" else b"*0"
            if command != b"PING":
                return b"%1\r\n+proto\r\n:3" if command == b"HELLO" else b"+OK"
            pings.append(command)
            is_loading = len(pings) <= num_loading
            return b"-LOADING Redis is loading the dataset in memory" if is_loading else b"+PONG"

    with socketserver.ThreadingUnixStreamServer(str(path), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        server.daemon_threads = True
        thread.start()
        try:
            yield pings
        finally:
            server.shutdown()
            thread.join()
