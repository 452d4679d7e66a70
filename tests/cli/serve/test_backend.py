"""The server's connection to Redis through a router that forgets idle connections."""

import select
import socket
import socketserver
import threading
import time

import anyio
import redis

from svdq.cli.serve import backend
from svdq.producer.settings import Settings


class Router(socketserver.ThreadingUnixStreamServer):
    """Passes bytes on to a server; of the connections that it has forgotten, none, and it does not close them."""

    daemon_threads = True

    def __init__(self, path: str, server: str) -> None:
        super().__init__(path, socketserver.StreamRequestHandler)
        self._server = server.removeprefix("unix://")
        self.forgotten = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        known = not self.forgotten.is_set()
        with socket.socket(socket.AF_UNIX) as onward:
            onward.connect(self._server)
            ends = {request: onward, onward: request}
            while ready := select.select(ends, [], [])[0]:
                for end in ready:
                    if not (data := end.recv(65536)):
                        return
                    if known and self.forgotten.is_set():
                        time.sleep(60)
                    ends[end].sendall(data)


def test_the_first_request_after_a_pause_is_answered(settings: Settings, tmp_path, monkeypatch) -> None:
    assert settings.redis_url is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "IDLE_S", 0.2)
    with Router("router.sock", settings.redis_url) as router:
        served = backend.Backend(settings.model_copy(update={"redis_url": f"unix://{tmp_path}/router.sock"}))

        def ping(connection: redis.Redis) -> bool:
            return bool(connection.ping())

        assert anyio.run(served.read, ping)
        router.forgotten.set()
        time.sleep(0.5)
        assert anyio.run(served.read, ping)
        router.shutdown()
