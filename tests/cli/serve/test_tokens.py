"""Named tokens: the name is the owner of what is submitted with one, and a running server takes changes."""

import contextlib
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from svdq.cli.serve.tokens import Tokens, cookie_of
from svdq.producer.queue import fetch
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.cli.serve.ended import finish as finish_video
from tests.cli.serve.servers import TOKEN, TYPE, TYPED, Answer, Serve, Server, multipart
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import JOB, finish
from tests.waiting import wait_until as until

pytestmark = pytest.mark.slow


def add(svdq: Cli, name: str) -> str:
    """Make a token; return it."""
    done = svdq("serve", "token", "add", name, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return str(json.loads(done.stdout)["token"])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_name_of_a_token_owns_what_is_submitted_with_it(
    serve: Serve, svdq: Cli, connection: redis.Redis, photo_bytes: bytes
) -> None:
    server = serve(SVDQ_OWNER="studio")

    def owner_of(seed: int, headers: dict[str, str], path: str = "/v1/videos") -> str:
        body = multipart(photo_bytes, family="svd", seed=seed)
        answer = server.ask("POST", path, body, {**headers, "Content-Type": TYPE})
        assert answer.status == 200, answer.body
        found = answer.json
        return view(connection, found["jobs"][0]["id"] if "jobs" in found else found["id"]).owner

    ana, ben = add(svdq, "ana"), add(svdq, "ben")
    cookie = server.ask("GET", f"/login?token={ana}", headers=TYPED).headers["Set-Cookie"].partition(";")[0]
    assert owner_of(1, server.bearer) == "studio"
    assert owner_of(2, bearer(ben)) == "ben"
    assert owner_of(3, {"Cookie": cookie}, "/page/photos") == "ana"
    made = server.ask("POST", "/v1/videos", multipart(photo_bytes, seed=4), {**bearer(ana), "Content-Type": TYPE}).json
    remix = server.ask("POST", f"/v1/videos/{made['id']}/remix", {"seed": 5}, bearer(ben)).json
    again = server.ask("POST", "/page/repeat", {"id": made["id"]}, bearer(ben)).json
    assert [view(connection, each["id"]).owner for each in (made, remix, again)] == ["ana", "ben", "ben"]
    listed = {
        each["id"]: each["svdq"]["owner"] for each in server.ask("GET", "/v1/videos", headers=bearer(ben)).json["data"]
    }
    assert [listed[each["id"]] for each in (made, remix, again)] == ["ana", "ben", "ben"]


def test_who_asks_for_a_video_to_be_upscaled_owns_that_job(
    serve: Serve, svdq: Cli, connection: redis.Redis, storage: Storage
) -> None:
    server = serve(SVDQ_OWNER="studio")
    ana = bearer(add(svdq, "ana"))
    kept = finish_video(connection, storage, 1, formats=("mp4",))
    for action in ("keep", "upscale"):
        answer = server.ask("POST", "/page/actions", {"action": action, "ids": [kept]}, ana)
        assert answer.json["problems"] == {}
    [job_id] = server.ask("GET", "/page/waiting", headers=ana).json["ids"]
    assert view(connection, job_id).owner == "ana"


def test_the_page_lists_and_cancels_ones_own(
    serve: Serve, svdq: Cli, connection: redis.Redis, storage: Storage
) -> None:
    server = serve(SVDQ_OWNER="studio")
    ana = bearer(add(svdq, "ana"))
    assert 'data-owner="ana" data-whose="mine"' in server.ask("GET", "/", headers=ana).body.decode()
    assert 'data-owner="studio" data-whose="everybody"' in server.get("/").body.decode()
    jobs = {}
    for number, owner in enumerate(("ana", "ana", "ben", "studio", "", "ana", "ben")):
        enqueue_many(connection, [Entry(job=JOB, job_id=f"{number:020x}", owner=owner)])
        jobs[number] = fetch(connection, f"{number:020x}")
    finish(jobs[5])
    finish(jobs[6])
    for number, owner in ((7, "ana"), (8, "ben")):  # which Redis has forgotten
        add_video(storage, number, owner=owner)

    def ids(headers: dict[str, str], path: str, name: str = "ids") -> set[int]:
        found = server.ask("GET", path, headers=headers).json[name]
        return {int(each["id"] if name == "results" else each, 16) for each in found}

    assert ids(ana, "/page/waiting") == {0, 1, 2, 3, 4}
    assert ids(ana, "/page/waiting?whose=mine") == {0, 1, 4}  # that without an owner is everybody's
    assert ids(server.bearer, "/page/waiting?whose=mine") == {3, 4}
    for brief in ("", "&brief=yes"):
        assert ids(ana, f"/page/results?show=open{brief}", "results") == {5, 6}
        assert ids(ana, f"/page/results?show=open&whose=mine{brief}", "results") == {5}
    before = server.ask("GET", "/page/results?show=open", headers=ana).json["next"]
    assert ids(ana, f"/page/results?show=open&before={before}", "results") == {7, 8}
    assert ids(ana, f"/page/results?show=open&whose=mine&before={before}", "results") == {7}
    assert server.ask("POST", "/page/actions", {"action": "cancel-waiting"}, ana).status == 200
    assert ids(ana, "/page/waiting") == {2, 3}
    everybody = {"action": "cancel-waiting", "everybody": True}
    assert server.ask("POST", "/page/actions", everybody, ana).status == 200
    assert ids(ana, "/page/waiting") == set()


def test_an_owner_above_the_limit_is_asked_to_wait(serve: Serve, svdq: Cli, photo_bytes: bytes) -> None:
    server = serve(SVDQ_MAX_WAITING="1")
    ana, ben = bearer(add(svdq, "ana")), bearer(add(svdq, "ben"))

    def create(headers: dict[str, str], seed: int) -> Answer:
        return server.ask("POST", "/v1/videos", multipart(photo_bytes, seed=seed), {**headers, "Content-Type": TYPE})

    assert [create(ana, 1).status, create(ana, 1).status, create(ben, 2).status] == [200] * 3
    refused = create(ana, 3)
    assert (refused.status, refused.error["code"]) == (429, "too_many_waiting")
    assert refused.error["message"].startswith("ana has 1 waiting of the 1 that")


def test_each_owner_has_a_folder_where_the_template_says_so(
    serve: Serve, svdq: Cli, connection: redis.Redis, photo_bytes: bytes
) -> None:
    server = serve(SVDQ_OUTPUT="{owner}/videos")
    headers = {**bearer(add(svdq, "ana")), "Content-Type": TYPE}
    api = server.ask("POST", "/v1/videos", multipart(photo_bytes, seed=1), headers).json["id"]
    [page] = server.ask("POST", "/page/photos", multipart(photo_bytes, family="svd", seed=2), headers).json["jobs"]
    assert [view(connection, each).parameters["folder"] for each in (api, page["id"])] == ["ana/videos"] * 2
    assert 'placeholder="{owner}/videos"' in server.get("/").body.decode()


def test_a_running_server_takes_new_tokens_and_refuses_removed_ones(server: Server, svdq: Cli, home: Path) -> None:
    ana = add(svdq, "ana")
    cookie = {"Cookie": server.ask("GET", f"/login?token={ana}", headers=TYPED).headers["Set-Cookie"].partition(";")[0]}
    path = home / "serve-tokens.json"
    assert path.stat().st_mode & 0o777 == 0o600
    for headers in (bearer(ana), cookie, server.bearer):
        assert server.ask("GET", "/v1/videos", headers=headers).status == 200
    path.chmod(0o644)
    assert server.ask("GET", "/v1/videos", headers=bearer(ana)).status == 401
    path.chmod(0o600)
    assert server.ask("GET", "/v1/videos", headers=bearer(ana)).status == 200
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as page:
        page.request("GET", "/page/events", headers=cookie)
        events = page.getresponse()
        assert events.readline() == b"event: state\r\n"
        assert svdq("serve", "token", "remove", "ana").stdout == "ana  removed\n"
        events.read()  # to its end: an open page hears no more
    for headers in (bearer(ana), cookie):
        assert server.ask("GET", "/v1/videos", headers=headers).status == 401
    assert server.ask("GET", f"/login?token={ana}", headers={}).status == 401
    assert server.get("/v1/videos").status == 200


def test_tokens_of_many_commands_at_once(home: Path) -> None:
    path = home / "serve-tokens.json"
    names = [f"person{number}" for number in range(16)]
    made = "import sys; from pathlib import Path; from svdq.cli.serve.tokens import add_token, remove_token\n"
    made += "add_token(Path(sys.argv[1]), 'x' + sys.argv[2]); add_token(Path(sys.argv[1]), sys.argv[2])\n"
    made += "remove_token(Path(sys.argv[1]), 'x' + sys.argv[2])"
    running = [subprocess.Popen([sys.executable, "-c", made, str(path), name]) for name in names]
    assert [process.wait(60) for process in running] == [0] * 16
    assert sorted(json.loads(path.read_text())) == sorted(names)


def test_a_cookie_is_found_among_ten_thousand_tokens_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "serve-tokens.json"
    path.write_text(json.dumps({f"person{number}": f"token-of-person-{number:06}" for number in range(10_000)}))
    path.chmod(0o600)
    tokens = Tokens(TOKEN, path)
    assert tokens.name_of("token-of-person-000007") == "person7"
    begun_s = time.process_time()
    assert [tokens.name_of_cookie("0" * 64) for _ in range(100)] == [None] * 100
    assert time.process_time() - begun_s < 0.1
    assert tokens.name_of_cookie(cookie_of(TOKEN)) == ""


def test_a_video_is_not_delivered_after_its_token_was_removed(server: Server, svdq: Cli, photo_bytes: bytes) -> None:
    ana = add(svdq, "ana")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as waiting:
        headers = {**bearer(ana), "Content-Type": TYPE}
        waiting.request("POST", "/v1/videos/sync", multipart(photo_bytes, seed=9), headers)
        until(lambda: server.get("/v1/videos").json["data"])
        svdq("serve", "token", "remove", "ana")
        assert waiting.getresponse().status == 401


def test_tokens_are_added_listed_and_removed(svdq: Cli, home: Path) -> None:
    assert "svdq serve token add NAME" in svdq("serve", "token", "list").stderr
    first = svdq("serve", "token", "add", "ana", "--url", "https://videos.example.com/").stdout
    assert first == f"ana  https://videos.example.com/login?token={add(svdq, 'ana')}\n"
    assert add(svdq, "ben") != add(svdq, "ana")
    assert svdq("serve", "token", "list").stdout == "ana\nben\n"
    for arguments, words in (
        (("add", "a/b"), "The name 'a/b' is not allowed"),
        (("add", "ana", "--url", "videos"), "--url 'videos' is not an address"),
        (("remove", "carl"), "There is no token of 'carl'"),
    ):
        done = svdq("serve", "token", *arguments)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    path = home / "serve-tokens.json"
    for text, mode, words in (
        ("[]", 0o600, "no JSON object"),
        ("{", 0o600, "no JSON object"),
        ("{}", 0o640, "chmod 600"),
    ):
        path.write_text(text)
        path.chmod(mode)
        done = svdq("serve", "token", "list")
        assert (done.returncode, words in done.stderr) == (2, True)
