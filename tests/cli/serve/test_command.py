"""Start and stop of `svdq serve`."""

import json
import os
import re
import signal
import socket
import stat
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from svdq.cli.serve.app import listen
from svdq.cli.serve.tokens import address_of_machine
from tests.cli.serve.servers import Serve
from tests.conftest import Cli
from tests.terminal import terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_each_start_prints_a_link_to_a_terminal_and_a_code_for_a_phone(home: Path, host: str) -> None:
    for _ in range(2):
        code = host != "127.0.0.1" and find_spec("segno") and address_of_machine()
        with terminal("serve", "--port", 0, "--host", host, size=(24, 200)) as screen:
            shown = b""
            while shown.count(b"\n") < (19 if code else 1):
                shown += os.read(screen.ours, 65536)
        line, *following = (line.rstrip() for line in shown.decode().splitlines()[: 19 if code else 1])
        token = (home / "serve-token").read_text().strip()
        name = host if host == "127.0.0.1" else address_of_machine() or socket.gethostname()
        assert re.fullmatch(rf"Serving at http://{re.escape(name)}:\d+/login\?token={token}", line)
        assert set("".join(following)) <= set(" ▄▀█")
        assert len({*map(len, following)}) <= 2


def test_the_first_start_creates_a_token_and_prints_only_its_place(serve: Serve, home: Path) -> None:
    first = serve("--port", "0", SVDQ_SERVE_TOKEN="")
    token = (home / "serve-token").read_text().strip()
    assert first.line == f"Serving at {first.url}/ (token: {home / 'serve-token'})\n"
    assert stat.S_IMODE((home / "serve-token").stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []

    second = serve("--port", "0", SVDQ_SERVE_TOKEN="")
    assert token not in second.line
    for server in (first, second):
        assert server.ask("GET", "/v1/nothing", headers={"Authorization": f"Bearer {token}"}).status == 404
        assert server.get("/v1/nothing").status == 401


def test_a_token_that_others_can_read_is_refused(svdq: Cli, home: Path) -> None:
    home.mkdir()
    path = home / "serve-token"
    path.write_text("a-token-that-is-long-enough")
    path.chmod(0o644)
    refused = svdq("serve", "--port", "0")
    assert (refused.returncode, "chmod 600" in refused.stderr) == (2, True)
    path.chmod(0o600)
    path.write_text("short")
    assert "holds no token" in svdq("serve", "--port", "0").stderr
    path.unlink()
    path.mkdir()
    assert "(Is a directory)" in svdq("serve", "--port", "0").stderr


@pytest.mark.parametrize("token", ["short", "with a space in the middle"])
def test_a_weak_token_is_refused(svdq: Cli, token: str, home: Path) -> None:
    refused = svdq("serve", "--port", "0", SVDQ_SERVE_TOKEN=token)
    assert refused.returncode == 2
    assert "SVDQ_SERVE_TOKEN" in refused.stderr
    assert token not in refused.stderr


@pytest.mark.parametrize(
    ("option", "kind", "values"),
    [
        ("--allow-host", "a name", ["https://videos.example", "videos.example:443", "*", ""]),
        ("--host", "an address", ["", "größe..x", "127.0.0.1:80", "*"]),
    ],
)
def test_wrong_names_of_hosts_are_refused(svdq: Cli, option: str, kind: str, values: list[str]) -> None:
    for value in values:
        refused = svdq("serve", "--port", "0", option, value)
        assert (refused.returncode, f"{option} {value!r} is not {kind}" in refused.stderr) == (2, True)


def test_a_taken_port_is_one_sentence(serve: Serve, svdq: Cli) -> None:
    first = serve()
    refused = svdq("serve", "--port", first.port)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"Error: The server cannot listen on 127.0.0.1 port {first.port}")


def test_a_worker_beside_it_imports_nothing_from_the_current_folder(serve: Serve, tmp_path: Path) -> None:
    module = Path("svdq/cli/__init__.py")
    module.parent.mkdir(parents=True)
    module.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    server = serve("--port", "0", "--with-worker", SVDQ_MODEL="/nowhere")
    wait_until(lambda: "The worker has ended" in server.output.read_text())
    assert not (tmp_path / "imported").exists()


def test_a_worker_beside_it_takes_options(serve: Serve, svdq: Cli) -> None:
    server = serve("--port", "0", "--with-worker", "--", "--ranks", "1", "--report", "/no/folder/night.json")
    wait_until(lambda: "The worker has ended with exit code 2" in server.output.read_text(), server.output.read_text)
    assert "no folder '/no/folder'" in server.output.read_text()
    for arguments, reason in (
        (("--with-worker", "--", "--rnaks", "2"), "No such option '--rnaks'"),
        (("--", "--ranks", "2"), "give --with-worker"),
    ):
        refused = svdq("serve", "--port", "0", *arguments)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert reason in refused.stderr


def test_a_worker_beside_it_sleeps_after_a_while_without_jobs(serve: Serve, home: Path) -> None:
    serve("--port", "0", "--with-worker", "--", "--ranks", "1", "--device", "cpu", SVDQ_MODEL="preview")
    (config,) = wait_until(lambda: [*(home / "run").glob("*/*/*/config.json")])
    wait_until(config.read_text)
    assert json.loads(config.read_text())["settings"]["on_demand"] == "10m"


def test_responses_on_a_kept_connection_are_not_delayed() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_request_is_named_in_the_log(serve: Serve, home: Path) -> None:
    server = serve("--port", "0", SVDQ_REDIS_URL="redis://127.0.0.1:1/0")
    answer = server.get("/v1/videos")
    assert answer.status == 503
    assert f"(request {answer.headers['X-Request-Id']})" in server.output.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_it_soon(serve: Serve, number: signal.Signals, code: int) -> None:
    server = serve()
    begin = time.monotonic()
    server.process.send_signal(number)
    assert server.process.wait(60) == code
    assert time.monotonic() - begin < 10
