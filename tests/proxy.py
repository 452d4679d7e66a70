"""A TCP proxy that a test silences."""

import select
import socket
import socketserver
import threading
import time
from typing import Any
from urllib.parse import urlsplit


class Proxy(socketserver.ThreadingTCPServer):
    """Passes bytes on to a server until it is silenced; then connections stay open, and nothing comes."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.StreamRequestHandler)
        self._server = urlsplit(url)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.silent = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request: Any, client_address: object) -> None:
        with socket.create_connection((self._server.hostname, self._server.port)) as onward:
            ends = {request: onward, onward: request}
            while ready := select.select(ends, [], [])[0]:
                for end in ready:
                    if not (data := end.recv(65536)):
                        return
                    while self.silent.is_set():
                        time.sleep(0.1)
                    ends[end].sendall(data)
