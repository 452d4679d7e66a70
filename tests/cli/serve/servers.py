"""A real `svdq serve` in a process of its own, and requests to it."""

import http.client
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from tests.forks import Fork

TOKEN = "token-of-the-tests-0123456789"
BOUNDARY = "svdq-test-boundary"
TYPED = {"Sec-Fetch-Site": "none"}  # what browsers send with an address that was typed, or opened by a program
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def multipart(photo: bytes | None = None, file_name: str = "a photo.jpg", **fields: object) -> bytes:
    """A form with a photo and fields, of which those of bytes are files; `__` in a name means a bracket."""
    parts = []
    files = {} if photo is None else {"input_reference": photo}
    for name, value in fields.items():
        if isinstance(value, bytes):
            files[name] = value
            continue
        parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    for name, data in files.items():
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{file_name}"\r\n'
        parts.append(head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n")
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def jpeg(number: int, megapixels: float = 2.0) -> bytes:
    """A photo of its own: enlarged noise, some hundred kilobytes a megapixel."""
    width = int((megapixels * 1e6 * 1.5) ** 0.5)
    noise = Image.frombytes("RGB", (96, 64), random.Random(number).randbytes(96 * 64 * 3))
    file = io.BytesIO()
    noise.resize((width, int(width / 1.5)), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass
class Answer:
    """One response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


@dataclass
class Server:
    """A running server."""

    process: Fork
    url: str  # such as http://127.0.0.1:8765
    output: Path  # what it prints
    token: str = TOKEN
    line: str = ""  # what it has printed first
    bearer: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {TOKEN}"})

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, within_s: float = 60
    ) -> Answer:
        """Send one request, with the token unless there are other headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        sent = dict(self.bearer if headers is None else headers)
        if isinstance(body, dict):
            body = json.dumps(body)
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers={**self.bearer, **headers})

    def create(self, photo: bytes | None = None, file_name: str = "a photo.jpg", **fields: object) -> Answer:
        """Send a form to /v1/videos."""
        body = multipart(photo, file_name, **fields)
        return self.ask("POST", "/v1/videos", body, {**self.bearer, "Content-Type": TYPE})

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(60)


Serve = Callable[..., Server]
