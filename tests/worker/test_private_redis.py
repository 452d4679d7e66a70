"""A Redis with TLS, a certificate of its own and users with few rights: it works, and no password ever comes out.

The users are those of docs/redis.md, as they stand there.
"""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
import redis

from svdq.producer import job_control
from svdq.producer.connection import session
from svdq.producer.pauses import pause, resume
from svdq.producer.settings_loader import load_settings
from tests.worker.own_redis import OwnRedis

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_server")]  # the URL of a server comes from svdq.toml here

ROOT = Path(__file__).parent.parent.parent
#: Passwords with what a URL does not take as it is.
PRODUCER, WORKER, ADMIN = "submit@s3cret/%1", "render@s3cret/%2", "admin-s3cret"
SECRET = "s3cret"  # what no file, no answer and no process list may contain: both spellings have it
#: Nobody's, and the one that a server loads its data as.
DEFAULT = "user default off ~* &* +@all"
EXTENSIONS = "subjectAltName=IP:127.0.0.1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnRedis]:
    """TLS only, and nobody may in without a password."""
    folder = tmp_path / "redis"
    folder.mkdir()
    certificate(tmp_path / "redis.pem", tmp_path / "redis.key")
    write_users(tmp_path / "users.acl")
    files = ("--tls-cert-file", tmp_path / "redis.pem", "--tls-key-file", tmp_path / "redis.key")
    trust = ("--tls-ca-cert-file", tmp_path / "redis.pem", "--tls-auth-clients", "no")
    try:
        server = OwnRedis(folder, *map(str, (*files, *trust, "--aclfile", tmp_path / "users.acl")), tls=True)
    except AssertionError as error:
        if "tls-" in str(error) or "TLS support" in str(error):
            pytest.skip("this machine's Redis server does not speak TLS")
        raise
    yield server
    server.stop()


def write_users(path: Path) -> None:
    """Write the ACL file of the documentation, with an admin."""
    page = (ROOT / "docs/redis.md").read_text()
    users = re.findall(r"^user svdq-.*$", page, re.MULTILINE)
    assert [user.split()[1] for user in users] == ["svdq-producer", "svdq-worker"]
    assert DEFAULT in page
    lines = [user.replace("PASSWORD", password) for user, password in zip(users, (PRODUCER, WORKER), strict=True)]
    path.write_text("\n".join([DEFAULT, f"user admin on >{ADMIN} ~* &* +@all", *lines]))


def certificate(path: Path, key: Path) -> None:
    """Make a self-signed certificate for the loopback."""
    subject = ("-subj", "/CN=redis of a test", "-addext", EXTENSIONS, "-days", "2")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    command = ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(path), *subject]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("this machine has no openssl to make a certificate with")


def url_of(server: OwnRedis, folder: Path, name: str, password: str) -> str:
    return server.url(f"{name}:{quote(password, safe='')}", "rediss", f"?ssl_ca_certs={folder / 'redis.pem'}")


@pytest.mark.long
def test_no_password_is_in_logs_files_or_process_lists(site, until, server: OwnRedis) -> None:
    producer = url_of(server, site.folder, "svdq-producer", PRODUCER)
    worker = url_of(server, site.folder, "svdq-worker", WORKER)
    admin = server.client(url_of(server, site.folder, "admin", ADMIN))
    said: list[str] = []

    def svdq(*arguments: object, code: int = 0, url: str = producer) -> str:
        answer = site.run("svdq", *arguments, SVDQ_REDIS_URL=url)
        said.append(answer.stdout + answer.stderr)
        assert answer.returncode == code, answer
        return str(answer.stdout)

    small = ("--frames", 2, "--steps", 8, "--size", "64x64", "--format", "gif", "--format", "mp4", "--force")
    jobs = [svdq("submit", site.photo, *small).split()[0] for _ in range(2)]
    svdq("submit", site.photo, *small, "--at", "23:59")
    with session(load_settings(redis_url=producer)) as connection:
        job_control.cancel(connection, jobs[0])
        job_control.retry(connection, jobs[0])
        job_control.move(connection, jobs[1], front=True, priority="high")
        pause(connection)
        resume(connection)

    for command in (("status",), ("status", jobs[0])):  # whether a worker starts
        svdq(*command)

    # The URL with the password is a line of svdq.toml, as for a service.
    (site.folder / "svdq.toml").write_text(f'redis_url = "{worker}"')
    trace = site.folder / "trace.json"
    group = site.start(2, model="simulated:step_ms=100", SVDQ_TRACE=str(trace))
    (site.folder / "svdq.toml").unlink()
    family = [psutil.Process(group.process.pid), *psutil.Process(group.process.pid).children(recursive=True)]
    shown = [" ".join(process.cmdline()) for process in family]
    assert any("--run-dir" in line for line in shown)
    said += shown

    svdq("wait", *jobs)
    assert {admin.hget(f"rq:job:{job_id}", "status") for job_id in jobs} == {b"finished"}
    for command in (("status", jobs[0], "--json"), ("list",), ("status", "--json"), ("logs", jobs[0])):
        svdq(*command)
    assert admin.acl_log() == []
    server.stop()
    until(lambda: "Redis does not answer" in group.text)
    server.start()
    until(lambda: "Redis is back." in group.text)
    admin = server.client(url_of(server, site.folder, "admin", ADMIN))
    assert admin.acl_log() == []  # since it was started
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert trace.exists()
    assert "NOPERM" not in group.text
    assert [text for text in said if SECRET in text] == []
    assert_secret_in_no_file(site.folder)


@pytest.mark.long
def test_a_worker_with_the_user_of_a_producer_ends_with_one_sentence(site, tmp_path: Path) -> None:
    (folder := tmp_path / "redis").mkdir()
    write_users(tmp_path / "users.acl")
    server = OwnRedis(folder, "--aclfile", str(tmp_path / "users.acl"))

    def said(name: str, password: str) -> str:
        url = server.url(f"{name}:{quote(password, safe='')}")
        answer = site.run("svdq", "worker", "--device", "cpu", "--ranks", 1, SVDQ_REDIS_URL=url, SVDQ_MODEL="preview")
        assert answer.returncode == 3
        (sentence,) = answer.stderr.splitlines()
        assert "does not allow its user to do this" in sentence
        assert "docs/redis.md" in sentence
        return sentence

    try:
        assert "'client|list' command" in said("svdq-producer", PRODUCER)
        admin = server.client(server.url(f"admin:{quote(ADMIN, safe='')}"))
        admin.execute_command("ACL", "SETUSER", "svdq-worker", "-subscribe")
        assert "'subscribe' command" in said("svdq-worker", WORKER)
        admin.execute_command("ACL", "SETUSER", "svdq-worker", "+subscribe", "resetchannels")
        assert "channel" in said("svdq-worker", WORKER)
    finally:
        server.stop()


@pytest.mark.long
def test_a_running_or_killed_worker_leaves_its_password_in_no_file(site, until, tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder, "--requirepass", SECRET)
    try:
        group = site.start(1, SVDQ_REDIS_URL=server.url(f":{SECRET}"))
        [config] = site.settings.home.rglob("config.json")
        assert files_with_secret(site.folder) == []
        group.send_signal(signal.SIGKILL)
        until(lambda: not server.client(server.url(f":{SECRET}")).client_list()[1:])  # its ranks have ended
        assert config.exists()
        assert files_with_secret(site.folder) == []
    finally:
        server.stop()


def files_with_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def assert_secret_in_no_file(folder: Path) -> None:
    """Logs, traces, videos, sidecars, checkpoints, and what Redis keeps on disk; the users' file is the server's."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "users.acl"]
    assert {path.suffix for path in files} >= {".log", ".json", ".mp4", ".gif", ".aof"}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_users_may_do_nothing_else(tmp_path: Path, server: OwnRedis) -> None:
    for name, password in (("svdq-producer", PRODUCER), ("svdq-worker", WORKER)):
        connection = redis.Redis.from_url(url_of(server, tmp_path, name, password))
        for forbidden in (
            ("GET", "secrets"),
            ("SET", "other", "1"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("SCRIPT", "FLUSH"),
            ("PUBLISH", "other", "x"),
            ("EVAL", "return redis.call('get', KEYS[1])", "1", "secrets"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                connection.execute_command(*forbidden)
        connection.close()


@pytest.mark.parametrize(
    ("command", "mistake", "reason", "exit_code"),
    [
        (("worker", "--ranks", 2), {"password": "wr0ng-s3cret"}, "refuses the user or the password", 3),
        (("submit", "photo.jpg"), {"password": PRODUCER}, "@ as %40", 2),
        (("list",), {"query": ""}, "certificate verify failed", 3),
        (
            ("worker",),
            {"query": "?ssl_ca_certs=/nowhere.pem"},
            "there is no file '/nowhere.pem', which ssl_ca_certs names",
            2,
        ),
    ],
)
def test_a_mistake_is_one_sentence_without_the_password(
    site, server: OwnRedis, command: tuple[object, ...], mistake: dict[str, str], reason: str, exit_code: int
) -> None:
    given = {"password": quote(PRODUCER, safe=""), "query": f"?ssl_ca_certs={site.folder / 'redis.pem'}", **mistake}
    url = server.url("svdq-producer:{password}".format(**given), "rediss", given["query"])
    answer = site.run("svdq", *command, SVDQ_REDIS_URL=url)
    assert answer.returncode == exit_code, answer
    assert answer.stdout == ""
    assert answer.stderr.startswith("Error: ")
    assert answer.stderr.count("\n") == 1
    assert reason in answer.stderr
    assert SECRET not in answer.stderr
