"""The connection to Redis: what is wrong with a URL or a server is named, and no password is."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer import connection as producer_connection
from svdq.producer.connection import connect, plain_errors, server_url, time_by_redis
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.registries import read_workers
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.submission import submit
from svdq.producer.text import parse_future
from svdq.producer.together import ask_one
from tests.conftest import Cli
from tests.loading_redis import loading_redis
from tests.waiting import wait_until
from tests.worker.own_redis import OwnRedis


@pytest.mark.parametrize("is_old", [True, False])
def test_the_home_is_private_whatever_the_umask(home: Path, photo: Path, is_old: bool) -> None:
    before = os.umask(0)
    try:
        if is_old:
            home.mkdir(mode=0o777)
            connect(load_settings()).close()
        else:
            submit(load_settings(), [photo], Draft(family="svd"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.slow
def test_commands_wait_for_a_server_that_loads_its_data(home: Path, tmp_path: Path) -> None:
    with loading_redis(tmp_path / "redis.sock", 12) as pings:  # longer than a restart takes
        connect(load_settings(redis_url=f"unix://{tmp_path}/redis.sock")).close()
        assert len(pings) == 13


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@127.0.0.1:1",
        "unix:///nowhere/secret.sock",
        "http://u:secret@h",
        "redis:/u:secret@h",
        "redis://:secret@h:p",
        "redis://:secret@[::1",
        "redis://:secret@a..b",
        "redis://:secret/b@h:6379/0",
        "redis://:a#secret@h:6379/0",
        "redis://u:a@secret/c@h:6379/0",
        "redis://:secret@h?token=secret",
        "redis://:secret@h?ssl_ca_certs=/x",
        "redis://h:1/0;password=secret",
        "redis://h/password=secret",
        "redis:///:secret@h",
        "redis://h/0#secret",
        "unix:/x;password=secret",
        "unix:///x;password=secret",
        "h:1,password=secret",
        "host=h password=secret",
    ],
)
def test_unreachable(home: object, url: str) -> None:
    is_url = url.startswith(("redis://u:secret", "unix:///nowhere"))
    with pytest.raises(UnavailableError if is_url else InputError) as caught:
        connect(load_settings(redis_url=url))
    assert "secret" not in str(caught.value).replace("secret.sock", "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "rediss://h:6379/0?ssl_ca_certs=/nowhere/ca.pem",
            "there is no file '/nowhere/ca.pem', which ssl_ca_certs names",
        ),
        ("redis://h:6379/0?sparkle=1", "it has an option 'sparkle', which this kind of URL has not"),
    ],
)
def test_what_is_wrong_with_a_url_is_named(home: object, url: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"cannot be understood: {why}; write it as")):
        connect(load_settings(redis_url=url))


def test_tls_to_a_plain_server_is_named(settings: Settings, own_server: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    end, _ = listener.accept()
                    end.recv(1000)
                    end.sendall(b"-ERR unknown command\r\n")
                    end.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UnavailableError, match=r"speaks no TLS; write its URL with redis://"):
            connect(load_settings(redis_url=f"rediss://127.0.0.1:{port}"))


def test_a_server_that_never_answers(home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_connection, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"^The Redis server {url} cannot be used \(Timeout"):
            connect(load_settings(redis_url=url))


@pytest.mark.parametrize(
    ("acl", "login", "sentence"),
    [
        (["resetpass", ">secret"], "", "needs a password; set SVDQ_REDIS_URL with it, such as redis://:PASSWORD@"),
        (["resetpass", ">secret"], ":wrong-one@", "refuses the user or the password; correct them in SVDQ_REDIS_URL."),
        (["resetpass", ">secret"], "nobody:secret@", "refuses the user or the password; correct them"),
        (["-@all", "+auth", "+hello", "+ping", "+client"], "", "does not allow its user to do this ("),
    ],
)
@pytest.mark.usefixtures("own_server")
def test_a_server_that_lets_one_in_with_a_password_or_rights(
    connection: redis.Redis, settings: Settings, svdq: Cli, acl: list[str], login: str, sentence: str
) -> None:
    url = server_url(settings).replace("unix://", f"unix://{login}")
    connection.execute_command("ACL", "SETUSER", "helper", "on", ">helper", "~*", "+@all")
    connection.execute_command("ACL", "SETUSER", "default", *acl)
    try:
        done = svdq("status", "--redis-url", url)
    finally:
        helper = redis.Redis(
            unix_socket_path=connection.get_connection_kwargs()["path"], username="helper", password="helper"
        )
        helper.execute_command("ACL", "SETUSER", "default", "resetpass", "nopass", "+@all")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert sentence in done.stderr
    assert "HELLO" not in done.stderr
    assert "secret" not in done.stderr
    assert "wrong-one" not in done.stderr


@pytest.mark.parametrize(("apart_s", "said"), [(7200, "is 2 h behind"), (-300, "is 5 min ahead of"), (20, "")])
def test_times_are_by_the_clock_of_redis(settings, monkeypatch, caplog, apart_s: int, said: str) -> None:
    by_redis = int(time.time()) + apart_s
    monkeypatch.setattr(redis.Redis, "time", lambda _: (by_redis, 0))
    now = time_by_redis(settings)
    assert now.timestamp() == by_redis
    assert parse_future("+60s", "--at", now).timestamp() == by_redis + 60
    assert (said in caplog.text) if said else not caplog.text


@pytest.mark.usefixtures("own_server")
def test_a_server_that_becomes_a_replica_is_left_for_what_its_name_is_then(settings: Settings) -> None:
    with connect(settings) as connection:
        before = connection.client_id()
        connection.replicaof("127.0.0.1", 1)
        with pytest.raises(redis.ReadOnlyError):
            connection.set("a", 1)
        assert ask_one(connection, read_workers())[1] == "unknown", "workers cannot renew their records"
        assert connection.client_id() != before
        connection.replicaof("NO", "ONE")
        assert ask_one(connection, read_workers())[1] == "none"


@pytest.mark.parametrize(
    ("trouble", "said"), [("full", "has reached its maxmemory"), ("disk", "cannot save its data, so it refuses writes")]
)
def test_a_server_that_refuses_writes_is_read_and_named(home: Path, tmp_path: Path, trouble: str, said: str) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder, "--save", "3600 1")
    settings = load_settings(redis_url=server.url())
    with server.client(server.url()) as connection:
        if trouble == "full":
            connection.config_set("maxmemory", 1)
        else:
            shutil.rmtree(folder)
            connection.bgsave()
            wait_until(lambda: connection.info("persistence")["rdb_last_bgsave_status"] == "err")
    with connect(settings) as connection:
        assert ask_one(connection, read_workers())[1] == "unknown", "workers cannot renew their records"
        with pytest.raises(UnavailableError, match=said), plain_errors(settings):
            connection.set("a", 1)
    server.stop(signal.SIGKILL)
