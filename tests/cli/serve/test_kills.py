"""Accepted is what was answered with 200: no kill of the server or of Redis loses it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from svdq.producer.embedded_redis import ensure_server
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import TYPE, Answer, Serve, Server, jpeg, multipart
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

NUM = 24
PATIENCE_S = 7  # what a busy machine may need more than an idle one


def photos() -> list[bytes]:
    """Different photos, so large that an upload takes more than one packet."""
    return [jpeg(number, 0.3) for number in range(NUM)]


class Uploads:
    """Uploads all photos at the same time, and keeps the answers."""

    def __init__(self, server: Server, data: list[bytes]) -> None:
        self.accepted: dict[int, str] = {}
        self.refused: dict[int, Answer] = {}
        self._server = server
        self._pool = ThreadPoolExecutor(len(data))
        self._done = [self._pool.submit(self._upload, number, each) for number, each in enumerate(data)]

    def _upload(self, number: int, data: bytes) -> None:
        try:
            answer = self._server.create(data, f"photo {number}.jpg", num_frames=number + 1)
        except (OSError, http.client.HTTPException):
            return  # the server was killed
        if answer.status == 200:
            self.accepted[number] = answer.json["id"]
        else:
            self.refused[number] = answer

    def wait(self) -> None:
        for future in self._done:
            future.result()
        self._pool.shutdown()


def check_complete(server: Server, data: list[bytes], accepted: dict[int, str], settings: Settings) -> None:
    """Accepted uploads are there; all uploads again add the others, and nothing else."""
    for number, video_id in accepted.items():
        assert server.get(f"/v1/videos/{video_id}").json["svdq"]["parameters"]["frames"] == number + 1
    again = Uploads(server, data)
    again.wait()
    assert again.refused == {}
    assert len(again.accepted) == NUM
    assert {number: again.accepted[number] for number in accepted} == accepted
    with redis.Redis.from_url(settings.redis_url or ensure_server(settings.home)) as connection:
        assert len(set(connection.lrange("rq:queue:svdq-default", 0, -1))) == NUM
        assert connection.llen("rq:queue:svdq-default") == NUM
    storage = Storage(settings.storage)
    inputs = [entry.key for entry in storage.entries("inputs")]
    assert len(inputs) == NUM
    assert sorted(storage.read_input(key) for key in inputs) == sorted(data)  # each as its hash says
    assert list(storage.entries("tmp")) == []


@pytest.mark.usefixtures("own_server")
def test_a_killed_server(serve: Serve, settings: Settings) -> None:
    data, first = photos(), serve()
    uploads = Uploads(first, data)
    while len(uploads.accepted) < 8:
        time.sleep(0.001)
    first.process.kill()
    uploads.wait()
    assert 8 <= len(uploads.accepted) < NUM
    assert uploads.refused == {}
    check_complete(serve(), data, uploads.accepted, settings)


@pytest.mark.usefixtures("own_server")
def test_a_killed_redis(serve: Serve, settings: Settings) -> None:
    data, server = photos(), serve()
    uploads = Uploads(server, data)
    wait_until(lambda: len(uploads.accepted) >= 5)
    with redis.Redis.from_url(ensure_server(settings.home)) as connection:
        os.kill(connection.info()["process_id"], signal.SIGKILL)
    uploads.wait()
    for answer in uploads.refused.values():
        assert (answer.status, answer.error["code"]) == (503, "redis_unavailable")
        assert int(answer.headers["Retry-After"]) > 0
    assert len(uploads.accepted) + len(uploads.refused) == NUM
    # The server itself starts the embedded one again.
    wait_until(lambda: server.get("/health").status == 200)
    check_complete(server, data, uploads.accepted, settings)


def test_redis_is_away(serve: Serve, settings: Settings, photo_bytes: bytes) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://:hidden@127.0.0.1:{unused.getsockname()[1]}/0"
        server = serve("--port", "0", SVDQ_REDIS_URL=url)
        assert server.get("/health/live").status == 200
        answers = [server.get(path) for path in ("/health", "/v1/videos", "/v1/videos/x", "/v1/models")]
        begun_at = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            answers += list(pool.map(server.create, [photo_bytes] * 20))
        assert time.monotonic() - begun_at < 20
    for answer in answers:
        assert (answer.status, answer.error["code"]) == (503, "redis_unavailable")
        assert answer.error["type"] == "server_error"
        assert answer.headers["Retry-After"]
        assert b"hidden" not in answer.body
    assert not Path(settings.storage).exists()


def test_the_storage_is_away(serve: Serve, photo_bytes: bytes, tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("not a folder")
    server = serve("--port", "0", SVDQ_STORAGE=str(place / "storage"))
    answer = server.create(photo_bytes)
    assert (answer.status, answer.error["code"]) == (503, "storage_unavailable")
    assert str(tmp_path) not in answer.body.decode()
    assert server.get("/v1/videos").json["data"] == []


def begin_upload(server: Server, body: bytes) -> http.client.HTTPConnection:
    """Send the headers of an upload and, when the server reads its body, the first 100 bytes of that."""
    upload = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    upload.putrequest("POST", "/v1/videos")
    headers = {"Content-Type": TYPE, "Content-Length": str(len(body)), "Expect": "100-continue"}
    for name, value in (server.bearer | headers).items():
        upload.putheader(name, value)
    upload.endheaders()
    assert upload.sock.recv(100).startswith(b"HTTP/1.1 100 ")
    upload.send(body[:100])
    return upload


def accepts_connections(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_sigterm_with_open_streams_uploads_and_downloads(
    serve: Serve, photo_bytes: bytes, connection: redis.Redis, settings: Settings
) -> None:
    server = serve()
    video_id = finish(connection, Storage(settings.storage), 1)
    # More than the kernel holds for a client.
    Storage(settings.storage).write_bytes(f"outputs/photo-{video_id}.gif", bytes(32 << 20))
    form = {**server.bearer, "Content-Type": "application/x-www-form-urlencoded"}
    asked = [
        *[("GET", "/page/events", None, server.bearer)] * 5,
        ("POST", "/page/zip", f"ids={video_id}", form),
        ("GET", f"/v1/videos/{video_id}/content", None, server.bearer),
    ]
    with contextlib.ExitStack() as opened:
        answers = []
        for each in asked:
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            opened.callback(client.close)
            client.request(*each)
            answers.append(client.getresponse())
            assert answers[-1].read(1)
        opened.callback(begin_upload(server, multipart(photo_bytes)).close)
        begun_at = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun_at < 3 + PATIENCE_S
        for stream in answers[:5]:
            stream.read()  # raises if it was cut off
    assert "Traceback" not in server.output.read_text()


def test_an_upload_that_has_begun_is_finished_at_sigterm(serve: Serve, photo_bytes: bytes) -> None:
    server = serve()
    # Starts the decoder of photos, which on a busy machine takes longer than a server leaves its requests at the end.
    assert server.create(photo_bytes).status == 200
    body = multipart(photo_bytes)
    upload = begin_upload(server, body)
    server.process.terminate()
    wait_until(lambda: not accepts_connections(server))
    upload.send(body[100:])
    answer = upload.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["status"] == "queued"
    upload.close()
    assert server.process.wait(30) == 0
