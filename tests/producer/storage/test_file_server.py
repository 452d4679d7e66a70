"""A storage on a file server, against a real SFTP server on this machine."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from svdq.pipeline.errors import UnavailableError
from svdq.producer.storage.storage import MARKER, Storage

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("asyncssh", "paramiko"))), reason="no SFTP server or client for Python here"
)

PASSWORD = "sftp-password"


#: The server, as a process of its own: what it shows, the port or 0, the password.
SERVER = """
import asyncio, sys
import asyncssh

class Users(asyncssh.SSHServer):
    def begin_auth(self, username):
        return True
    def password_auth_supported(self):
        return True
    def validate_password(self, username, password):
        return password == sys.argv[3]

async def serve():
    listener = await asyncssh.listen(
        "127.0.0.1",
        int(sys.argv[2]),
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        server_factory=Users,
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=sys.argv[1]),
    )
    print(listener.get_port(), flush=True)
    await listener.wait_closed()

asyncio.run(serve())
"""


class Server:
    """An SFTP server that shows one folder."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(port), PASSWORD], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def server(served: Path) -> Iterator[Server]:
    server = Server(served)
    yield server
    server.stop()


def url_of(server: Server) -> str:
    return f"sftp://me:{PASSWORD}@127.0.0.1:{server.port}/some/prefix"


def test_files_and_folders_are_written_and_removed(server: Server, served: Path) -> None:
    storage = Storage(url_of(server))
    assert (list(storage.entries("outputs")), storage.names("outputs")) == ([], [])
    assert not storage.exists("inputs")
    for content in (b"one", b"two"):
        with storage.staging() as folder:
            (folder / "a ü.mp4").write_bytes(content)
            (folder / "frames").mkdir()
            (folder / "frames" / f"{content.decode()}.png").write_bytes(content)
            storage.publish(folder / "a ü.mp4", "outputs/1/a ü.mp4")
            storage.publish(folder / "frames", "outputs/1/frames")
        storage.write_bytes("outputs/1/a.json", content)
    # On the server itself: every file under its name, and nothing half written beside them.
    found = {path.relative_to(served).as_posix(): path.read_bytes() for path in served.rglob("*") if path.is_file()}
    assert found.pop(f"some/prefix/{MARKER}")
    assert found == {f"some/prefix/outputs/1/{name}": b"two" for name in ("a ü.mp4", "frames/two.png", "a.json")}
    assert {entry.key: entry.size for entry in storage.entries("outputs")} == {
        f"outputs/1/{name}": 3 for name in ("a ü.mp4", "frames/two.png", "a.json")
    }
    assert dict(storage.read_many(["outputs/1/a.json", "outputs/none"])) == {"outputs/1/a.json": b"two"}
    assert storage.location("outputs/1/a.json") == f"sftp://me:***@127.0.0.1:{server.port}/some/prefix/outputs/1/a.json"
    storage.remove("outputs/1")
    storage.remove("outputs/1")
    assert list(storage.entries("outputs")) == []


def test_a_failed_write_leaves_nothing(server: Server, served: Path) -> None:
    storage = Storage(url_of(server))
    storage.write_bytes("outputs/folder/x.json", b"{}")
    with pytest.raises(UnavailableError):
        storage.write_bytes("outputs/folder", b"{}")  # a folder is in the way of the rename
    assert list((served / "some/prefix/tmp").iterdir()) == []


def test_a_restarted_server_is_used_again(served: Path) -> None:
    server = Server(served)
    storage = Storage(url_of(server))
    storage.write_text("outputs/a.json", "{}")
    server.stop()
    for _ in range(2):
        with pytest.raises(UnavailableError) as caught:
            storage.write_text("outputs/a.json", "[]")
        assert PASSWORD not in str(caught.value)
    server = Server(served, server.port)
    try:
        storage.write_text("outputs/a.json", "[1]")
        assert storage.read("outputs/a.json") == b"[1]"
    finally:
        server.stop()


def test_the_error_of_a_wrong_password_does_not_show_it(server: Server) -> None:
    with pytest.raises(UnavailableError) as caught:
        Storage(url_of(server).replace(PASSWORD, "wrong-word"))
    assert "wrong-word" not in str(caught.value)
    assert "Authentication failed" in str(caught.value)
