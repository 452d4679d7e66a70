"""A TCP proxy that a test slows down, silences or cuts."""

import contextlib
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit


class Proxy(socketserver.ThreadingTCPServer):
    """Passes bytes on to a server, at a TCP port or a Unix socket, as the network in between allows."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, url: str, *, delay_s: float = 0.0) -> None:
        """Listen on loopback; `url` is that of the server, and `delay_s` the seconds of a round trip."""
        super().__init__(("127.0.0.1", 0), socketserver.StreamRequestHandler)
        self._server = urlsplit(url)
        scheme = "redis" if self._server.scheme == "unix" else self._server.scheme
        self.url = f"{scheme}://127.0.0.1:{self.server_address[1]}"
        self.delay_s = delay_s
        self.silent = threading.Event()  # while set, connections stay open, and nothing comes
        self.cut = threading.Event()  # while set, connections are closed as soon as somebody sends something
        self.deaf = threading.Event()  # while set, nothing is taken from those who ask
        self.rate_b_s = 0.0  # bytes a second that are passed on of what is taken at once; 0: no limit
        self.num_bytes = 0  # that were taken from those who ask
        self.edit: Callable[[bytes], bytes] = bytes  # changes what comes from the server
        self.num_round_trips = 0  # with a delay: without, a long question may be answered before its end
        self._age = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def forget(self) -> None:
        """Pass on nothing more of the present connections, as a router that has forgotten them: it closes none."""
        self._age += 1

    def finish_request(self, request: Any, client_address: object) -> None:
        is_unix = self._server.scheme == "unix"
        with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as onward:
            onward.connect(self._server.path if is_unix else (self._server.hostname, self._server.port))
            for each in (request, onward):
                if each.family != socket.AF_UNIX:
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = threading.Event()
            answers = threading.Thread(target=self._pass_on, args=(onward, request, asked, True), daemon=True)
            answers.start()
            self._pass_on(request, onward, asked, is_answer=False)
            answers.join()

    def _pass_on(self, sender: socket.socket, receiver: socket.socket, asked: threading.Event, is_answer: bool) -> None:
        """Pass on what comes from one side until that ends, then end the other."""
        age = self._age
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def send() -> None:
            data = b"-"
            with contextlib.suppress(OSError):
                while data:
                    due_at, data = waiting.get()
                    time.sleep(max(0.0, due_at - time.monotonic()))
                    while self.silent.is_set() or age != self._age:
                        time.sleep(0.1)
                    if is_answer:
                        data = self.edit(data)
                        asked.clear()
                    elif self.rate_b_s:
                        time.sleep(len(data) / self.rate_b_s)
                    receiver.sendall(data)
            with contextlib.suppress(OSError):
                receiver.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=send, daemon=True).start()
        data = b"-"
        while data:
            while self.deaf.is_set() and not is_answer:
                time.sleep(0.05)
            try:
                data = sender.recv(65536)
            except OSError:
                data = b""
            if self.cut.is_set():
                data = b""
            self.num_bytes += 0 if is_answer else len(data)
            if data and not is_answer and not asked.is_set():
                self.num_round_trips += 1
                asked.set()
            waiting.put((time.monotonic() + self.delay_s / 2, data))
