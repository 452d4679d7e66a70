"""Requests that are refused have a clear error each, and leave nothing behind."""

import contextlib
import io
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from PIL import Image

from svdq.cli.serve.api_errors import without_folders
from svdq.cli.serve.bodies import URLENCODED
from svdq.producer.settings import Settings
from tests.cli.serve.servers import BOUNDARY, TYPE, Serve, Server, multipart
from tests.queued import JOB, enqueue
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def nothing_left(settings: Settings, connection: redis.Redis) -> Any:
    """Check that there is no job and no file."""

    def check() -> None:
        assert connection.keys("rq:job:*") == []
        folder = Path(settings.storage)
        assert [path for path in folder.rglob("*") if path.is_file()] == []

    return check


def png(width: int, height: int) -> bytes:
    """A PNG whose header has a size, and which is much smaller."""
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD_PHOTOS = [
    (b"", "0 bytes"),
    (b"not a photo at all", "not a photo"),
    (png(60_000, 60_000), "60000x60000 pixels"),
    (b"\xff\xd8\xff\xe0\x00\x10JFIF", "damaged|not a photo"),
]


def test_bad_photos(server: Server, nothing_left: Any, settings: Settings) -> None:
    for data, reason in BAD_PHOTOS:
        answer = server.create(data, "../../etc/my LoRA test.jpg")
        assert answer.status == 400
        assert answer.error["param"] == "input_reference"
        assert any(part in answer.error["message"] for part in reason.split("|")), answer.error
        assert "etc" not in answer.error["message"]
        assert str(settings.home.parent) not in answer.body.decode()
    nothing_left()


#: Fields with a wrong value.
WRONG = (
    "num_frames=many num_frames=0 size=1280x721 size=large seconds=-1 guidance_scale=x seed=-1 format=avi "
    "priority=urgent at=yesterday output=../../etc name=../x name={seed.__class__} model=sora-2 family=gan colour=red "
    "extra_params={ input_reference=https://example.com/a.jpg input_reference=data:image/png;base64,@@"
)
#: Fields, and the parameter that the error is about.
BAD_FIELDS: list[tuple[dict[str, str], str]] = [
    *(({each.partition("=")[0]: each.partition("=")[2]}, each.partition("=")[0]) for each in WRONG.split()),
    ({"prompt": "x" * 10_000}, "prompt"),
    ({"extra_params[colour]": "red"}, "colour"),
    ({"size": "576x320", "width": "640"}, "width"),
    ({"guidance_scale": "2", "max_guidance_scale": "2"}, "guidance_scale"),
    ({"fps": "0", "seconds": "2"}, "fps"),
    ({"flow_shift": "3", "motion_bucket_id": "3"}, "motion_bucket_id"),
    ({"input_reference[file_id]": "file-1"}, "input_reference"),
]


def test_bad_fields(server: Server, photo: Path, nothing_left: Any) -> None:
    for fields, param in BAD_FIELDS:
        data = None if "input_reference" in "".join(fields) else photo.read_bytes()
        answer = server.create(data, **fields)
        assert answer.status == 400, (fields, answer.body)
        assert answer.error["param"] == param, (fields, answer.error)
        assert answer.error["type"] == "invalid_request_error"
        assert "--" not in answer.error["message"]  # the names of fields, not flags of the command line
        assert answer.error["code"]
    nothing_left()


def test_a_missing_photo_and_two(server: Server, photo: Path, nothing_left: Any) -> None:
    assert server.create(prompt="a dog").error["code"] == "missing_parameter"
    two = server.create(photo.read_bytes(), input_reference="data:image/jpeg;base64,AAAA")
    assert (two.status, two.error["code"]) == (400, "duplicate")
    body = multipart(photo.read_bytes()).removesuffix(f"--{BOUNDARY}--\r\n".encode()) + multipart(photo.read_bytes())
    files = server.ask("POST", "/v1/videos", body, {**server.bearer, "Content-Type": TYPE})
    assert (files.status, files.error["code"]) == (400, "duplicate")
    nothing_left()


def test_a_last_frame_that_cannot_be_had(server: Server, photo: Path, nothing_left: Any) -> None:
    data = photo.read_bytes()
    for fields, param in (
        ({"last_reference": b"no photo"}, "last_reference"),
        ({"last_reference": data, "family": "svd"}, "last_reference"),
        ({"last_reference": data, "loop": "true"}, "loop"),
        ({"loop": "true", "motion_bucket_id": "3"}, "motion_bucket_id"),
    ):
        answer = server.create(data, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), (fields, answer.body)
        assert "--" not in answer.error["message"]
    nothing_left()


#: Bodies, their types, and the codes of the errors.
BROKEN_BODIES = [
    (b"--nonsense", TYPE, "bad_form"),
    (f"--{BOUNDARY}\r\nContent-Disposition: form-data\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(), TYPE, "bad_form"),
    (b"x", "multipart/form-data", "bad_form"),
    (b"{", "application/json", "bad_json"),
    (b"\xff", "application/json", "bad_json"),
    (b"[" * 100_000, "application/json", "bad_json"),
    (b"[]", "application/json", "bad_json"),
    (b"", "application/json", "missing_parameter"),
    (b'{"prompt": "\\ud800"}', "application/json", "invalid_value"),
    (b'{"prompt": {"a": 1}}', "application/json", "invalid_value"),
    (b'{"\\ud800": 1}', "application/json", "unknown_parameter"),
    (b"x=1", URLENCODED, "unknown_parameter"),
    (b"input_reference=data%3Aimage%2Fjpeg%3Bbase64%2C*", URLENCODED, "invalid_value"),
    (b"prompt=%ff", URLENCODED, "bad_form"),
    (b"&".join([b"seed=1"] * 65), URLENCODED, "bad_form"),
    (b"x", "image/jpeg", "unknown_content_type"),
]


def test_broken_bodies(server: Server, nothing_left: Any) -> None:
    for body, kind, code in BROKEN_BODIES:
        answer = server.ask("POST", "/v1/videos", body, {**server.bearer, "Content-Type": kind})
        assert (answer.status, answer.error["code"]) == (400, code), body[:80]
    nothing_left()


def test_much_text_is_not_kept_in_memory(server: Server, nothing_left: Any) -> None:
    answer = server.create(b"", **{f"extra_params[{number}]": "x" * (1 << 20) for number in range(9)})
    assert (answer.status, answer.error["code"]) == (400, "bad_form")
    assert "8 MiB" in answer.error["message"]
    nothing_left()


def test_much_text_of_many_requests_is_refused(server: Server, photo: Path, nothing_left: Any) -> None:
    """As anybody with the token may send much of each request, and never the end."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image_reference"\r\n\r\n'.encode()
    with contextlib.ExitStack() as opened:
        held = []
        for _ in range(8):
            held.append(opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
            held[-1].sendall(head(server, "Content-Length: 20000000") + part + b"a" * ((8 << 20) - 100))
        long = "data:image/jpeg;base64," + "A" * (1 << 20)

        def is_busy() -> bool:
            answer = server.create(image_reference=long)
            return (answer.status, answer.error["code"]) == (503, "busy")

        wait_until(is_busy)
        assert server.create(b"no photo", prompt="a dog").status == 400  # a short text is read
    wait_until(lambda: server.create(image_reference=long).status == 400)
    nothing_left()


def test_a_login_is_short(server: Server) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.ask("POST", "/login", b"token=" + b"a" * 10_000, kind)
    assert (answer.status, answer.error["code"]) == (413, "too_large")


@pytest.mark.parametrize("values", [b"[],", b"{},", b"0,"])
def test_json_of_many_values_is_not_parsed(server: Server, values: bytes) -> None:
    body = b'{"x": [' + values * 1_000_000 + b"0]}"
    answer = server.ask("POST", "/v1/videos", body, {**server.bearer, "Content-Type": "application/json"})
    assert (answer.status, answer.error["code"]) == (400, "bad_json")
    assert "10,000 values" in answer.error["message"]


def test_broken_logins(server: Server) -> None:
    answer = server.ask("POST", "/login", b"x", {"Content-Type": "multipart/form-data"})
    assert (answer.status, answer.error["code"]) == (400, "bad_request")
    for kind in (TYPE, f"{TYPE}; charset=unicode_escape"):
        answer = server.ask("POST", "/login", multipart(token="\\ud800"), {"Content-Type": kind})
        assert (answer.status, b"The token is wrong." in answer.body) == (401, True)


def test_wrong_methods_and_paths(server: Server) -> None:
    for method, path in [("PUT", "/v1/videos"), ("POST", "/v1/models")]:
        answer = server.ask(method, path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    for path, methods in [("/v1/videos", "GET, HEAD, POST"), ("/v1/videos/an-id", "DELETE, GET, HEAD")]:
        assert server.ask("PUT", path).headers["allow"] == methods
    for name in ("edits", "extensions", "characters"):
        answer = server.ask("POST", f"/v1/videos/{name}")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert server.get("/v1/nothing").error["code"] == "not_found"
    assert server.get("/static/../../../../etc/passwd").status == 404
    assert server.get("/static/%2e%2e/%2e%2e/access.py").status == 404


def send(server: Server, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts of a request, and return what comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
        except OSError:
            pass  # the server has seen enough
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


def head(server: Server, *lines: str) -> bytes:
    first = ["POST /v1/videos HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {server.token}"]
    return "\r\n".join([*first, f"Content-Type: {TYPE}", "Connection: close", *lines, "", ""]).encode()


def test_large_headers_are_refused(server: Server) -> None:
    parts = [b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nX: ", *[b"a" * 1000] * 70, b"\r\n\r\n"]
    answer = send(server, *parts, pause_s=0.01)
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer
    assert server.get("/health").status == 200


def test_a_body_that_is_too_large(serve: Serve, nothing_left: Any) -> None:
    server = serve("--port", "0", SVDQ_MAX_PIXELS="100000")
    data = multipart(b"\xff" * (4 << 20))
    coded = [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (data[: 1 << 20], data[1 << 20 :])]
    answer = send(server, head(server, "Transfer-Encoding: chunked"), *coded, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"too_large"' in answer
    assert b"SVDQ_MAX_PIXELS" in answer
    text = send(server, head(server, "Content-Length: 9999999").replace(TYPE.encode(), b"application/json"))
    assert (text[9:12], b"as multipart/form-data" in text) == (b"413", True)
    nothing_left()


def test_an_interrupted_upload_leaves_nothing(server: Server, photo: Path, nothing_left: Any) -> None:
    data = multipart(photo.read_bytes() * 50)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(server, f"Content-Length: {len(data)}") + data[: len(data) // 2])
        files = Path(f"/proc/{server.process.pid}/fd")
        wait_until(lambda: any("(deleted)" in target(path) for path in files.iterdir()))
    wait_until(lambda: not any("(deleted)" in target(path) for path in files.iterdir()))
    assert server.get("/health").status == 200
    nothing_left()


def target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize("status", [b"created", b""])
def test_a_job_that_was_never_queued_is_deleted(server: Server, connection: redis.Redis, status: bytes) -> None:
    job = enqueue(connection, JOB, "a" * 12)
    connection.hset(job.key, mapping={"status": status, "group_id": "-1"})
    assert server.ask("DELETE", f"/v1/videos/{job.id}").status == 200
    assert not connection.exists(job.key)


def test_errors_name_no_folder() -> None:
    for text, plain in {
        "There is no LoRA 'x' in '/home/ana/my loras'; put x.safetensors there.": "'x' in 'my loras'; put x",
        "The file '/srv/loras/x.safetensors' is cut.": "The file 'x.safetensors' is cut.",
        "It is in /srv/models/wan, see https://example.com/a/b.": "It is in wan, see https://example.com/a/b.",
        "Either/or 'is' 3/4 fine.": "Either/or 'is' 3/4 fine.",
    }.items():
        assert plain in without_folders(text)
