"""A small model hub on this machine: the few requests that the hub's client makes, answered from folders."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One model, perhaps other repositories, and how the hub behaves; what tests change between requests."""

    def __init__(self, repository: str, folder: Path) -> None:
        self.repository = repository
        self.folder = folder
        #: The folders of other repositories.
        self.others: dict[str, Path] = {}
        self.url = ""
        #: Status, and the hub's code for the reason, of every request for a file; None gives it out.
        self.refuse: tuple[int, str] | None = None
        #: The token that opens a gate all the same.
        self.token = ""
        #: Sizes that are told instead of the real ones.
        self.sizes: dict[str, int] = {}
        #: A file whose transfer breaks off in the middle, and how often it does before it is whole.
        self.breaks: dict[str, int] = {}
        #: Status of every request for a file whose transfer has broken off.
        self.after_break: int | None = None
        #: Files that were given out, whole or in part.
        self.given: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    _broken: set[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if found := re.fullmatch(r"api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._model(found[1], found[2])
        elif found := re.fullmatch(r"api/models/([^/]+/[^/]+)/tree/.+", path):
            self._send(200, json.dumps(self._tree(found[1])).encode(), {})
        elif found := re.fullmatch(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(self._folder_of(found[1]), found[3], body=body)
        else:
            self._say(404, "RepoNotFound")

    def _folder_of(self, repository: str) -> Path:
        return self.hub.others.get(repository, self.hub.folder)

    def _model(self, repository: str, revision: str | None) -> None:
        hub = self.hub
        if repository != hub.repository and repository not in hub.others:
            self._say(404, "RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self._say(404, "RevisionNotFound")
        else:
            names = dict(self._files_of(repository)) | (hub.sizes if repository == hub.repository else {})
            siblings = [{"rfilename": name, "size": size} for name, size in names.items()]
            self._send(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(), {})

    def _files_of(self, repository: str) -> list[tuple[str, int]]:
        folder = self._folder_of(repository)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]

    def _tree(self, repository: str) -> list[dict[str, object]]:
        paths = self._files_of(repository)
        return [{"type": "file", "path": path, "size": size, "oid": "0"} for path, size in paths]

    def _file(self, folder: Path, name: str, *, body: bool) -> None:
        hub = self.hub
        if hub.refuse is not None and (not hub.token or self.headers["Authorization"] != f"Bearer {hub.token}"):
            self._say(*hub.refuse)
            return
        if name in self._broken and hub.after_break is not None:
            self._say(hub.after_break, "")
            return
        data = (folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if not body:
            self._send(200, b"", headers | {"Content-Length": str(len(data))})
            return
        hub.given.append(name)
        if hub.breaks.get(name, 0) > 0:
            hub.breaks[name] -= 1
            self._broken.add(name)
            self._send(200, data[: len(data) // 2], headers | {"Content-Length": str(len(data))})
            self.close_connection = True
            return
        self._send(200, data, headers)

    def _say(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def know(monkeypatch: pytest.MonkeyPatch, cache: Path, url: str = "http://127.0.0.1:1") -> None:
    """Have the client of this process, which has read its environment, know a cache and the hub of a URL only."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {"HF_HUB_CACHE": cache, "HF_TOKEN_PATH": cache / "token", "ENDPOINT": url}
    for name, value in (values | {"HUGGINGFACE_CO_URL_TEMPLATE": template}).items():
        monkeypatch.setattr(constants, name, str(value))


@contextmanager
def running(repository: str, folder: Path) -> Iterator[Hub]:
    """Serve one model for a block."""
    hub = Hub(repository, folder)
    handler = type("Handler", (_Handler,), {"hub": hub, "_broken": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
