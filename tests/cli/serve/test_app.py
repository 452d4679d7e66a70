"""Clients that send slowly, and servers with short limits for them."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cli.serve.servers import TOKEN, TYPE, multipart
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: A server with short limits.
RUN = f"""
from svdq.cli.serve import app, bodies
from svdq.cli.serve.access import ServeOptions
from svdq.cli.serve.tokens import Tokens
from svdq.producer.settings_loader import load_settings

app.HEADERS_S, bodies.PHOTO_S = 1, 3
app.MAX_CONNECTIONS = 20
listener = app.listen("127.0.0.1", 0)
port = listener.getsockname()[1]
options = ServeOptions(port=port, tokens=Tokens({TOKEN!r}))
app.run(app.make_app(load_settings(), options, lambda: print(port, flush=True)), listener)
"""


@pytest.fixture(scope="module")
def port(shared_redis: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    environment = {"SVDQ_HOME": str(tmp_path_factory.mktemp("slow")), "SVDQ_REDIS_URL": shared_redis}
    command = [sys.executable, "-c", RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    while more := connection.recv(65536):
        answer += more
    return answer


@pytest.mark.parametrize("begin", [b"", b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_headers_that_do_not_arrive(port: int, begin: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        begun_at = time.monotonic()
        connection.sendall(begin)
        assert until_closed(connection) == b""
        assert time.monotonic() - begun_at > 0.9


def test_headers_that_stop_after_the_first_request(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /he")
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("rest", [b"x", b"x" * 10])
def test_an_unread_body_after_its_answer(port: int, rest: bytes) -> None:
    """Neither a byte of it nor all of it keeps the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(rest)
        assert until_closed(connection).endswith(b"}")


def begin(port: int, path: str, *lines: str) -> socket.socket:
    """Send the headers of a request; return its connection when the server reads the body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "Content-Length: 1000", "Expect: 100-continue"]
    connection.sendall("\r\n".join([*head, "", ""]).encode())
    assert connection.recv(12) == b"HTTP/1.1 100"
    return connection


def test_connections_that_send_nothing_keep_out_nobody(port: int) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(25):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert status(port) == 200


def test_logins_that_do_not_arrive_keep_out_nobody(port: int) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(25):
            opened.enter_context(begin(port, "/login", "Content-Type: application/x-www-form-urlencoded"))
        assert status(port) == 200


def test_too_many_requests_at_a_time(port: int) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(21):
            kind = f"Content-Type: {TYPE}"
            opened.enter_context(begin(port, "/v1/videos", f"Authorization: Bearer {TOKEN}", kind))
        assert status(port) == 503
    wait_until(lambda: status(port) == 200)


def status(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/health/live")
    with contextlib.closing(connection):
        return connection.getresponse().status


def test_a_slow_upload(port: int) -> None:
    body = multipart(b"x" * 50_000)
    lines = ["POST /v1/videos HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}", f"Content-Type: {TYPE}"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head)
        try:
            for byte in body[:300]:  # a byte at a time never stops, and is too slow
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"too_slow"' in answer
