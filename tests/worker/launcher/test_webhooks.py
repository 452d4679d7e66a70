"""Webhooks to an HTTP server of the test's: signed, in order for each video, again after a failure or a kill."""

import base64
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
import redis

from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.producer.outbox import Event, Outbox, reading_outbox, tell
from svdq.producer.settings import Settings
from svdq.producer.together import ask_one
from svdq.worker.launcher import webhooks
from svdq.worker.launcher.webhooks import Webhooks

SECRET = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
TOKEN = "t0ken-of-the-url"
LIFE: tuple[Event, ...] = ("video.created", "video.started", "video.completed", "video.deleted")

ENDLESS_SENDER = """
import threading
from svdq.producer.settings_loader import load_settings
from svdq.worker.launcher.webhooks import Webhooks
with Webhooks(load_settings()):
    print("sending", flush=True)
    threading.Event().wait()
"""


class Receiver:
    """Accepts what it is sent, or answers as `status` says for a video; keeps what it accepts and what it refuses."""

    def __init__(self, port: int = 0) -> None:
        self.accepted: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.seen_by_sdk: list[Any] = []
        self.paths: list[str] = []
        self.status: dict[str, int] = {}
        self.hanging: set[str] = set()  # videos that get no answer
        self.delay_s = 0.0
        self._closing = threading.Event()
        outer, client = self, openai.OpenAI(api_key="none", webhook_secret=SECRET)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                event = client.webhooks.unwrap(body.decode(), dict(self.headers))  # raises, unless it is signed
                outer.seen_by_sdk.append(event)
                outer.paths.append(self.path)
                values = json.loads(body)
                video = values["data"]["id"]
                outer._closing.wait(3600.0 if video in outer.hanging else outer.delay_s)
                status = outer.status.get(video, 204)
                (outer.accepted if status < 300 else outer.refused).append(values)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Location", f"http://127.0.0.1:{outer.port}/elsewhere")
                    self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hooks?key={TOKEN}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def types(self, video: str) -> list[str]:
        """The types of the accepted events of a video."""
        return [event["type"] for event in self.accepted if event["data"]["id"] == video]

    @property
    def ids(self) -> list[str]:
        return [event["id"] for event in self.accepted]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(autouse=True)
def wanted(connection: redis.Redis) -> None:
    connection.set(keys.WEBHOOKS_WANTED, "1")


def sending_to(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"webhook_url": url, "webhook_secret": SECRET})


def tell_lives(connection: redis.Redis, *videos: str) -> None:
    for event in LIFE:
        for video in videos:
            tell(connection, event, video)


def left(connection: redis.Redis) -> int:
    return connection.xlen(keys.WEBHOOKS)


def outbox(connection: redis.Redis) -> Outbox:
    return ask_one(connection, reading_outbox())


def test_events_are_those_of_openai(settings: Settings, connection: redis.Redis, receiver: Receiver) -> None:
    tell_lives(connection, "a")
    with Webhooks(sending_to(settings, receiver.url)):
        pass  # the end of a run waits for what is to be sent
    assert receiver.types("a") == [*LIFE]
    completed, seen = receiver.accepted[2], receiver.seen_by_sdk[2]
    assert completed.keys() == {"id", "object", "created_at", "type", "data"}
    assert (completed["object"], completed["data"]) == ("event", {"id": "a"})
    assert (seen.id, seen.type, seen.created_at, seen.data.id) == (
        completed["id"],
        "video.completed",
        completed["created_at"],
        "a",
    )
    assert {*receiver.paths} == {f"/hooks?key={TOKEN}"}
    assert len({*receiver.ids}) == 4
    assert left(connection) == 0


def test_a_worker_that_starts_wants_events(settings: Settings, connection: redis.Redis, receiver: Receiver) -> None:
    connection.delete(keys.WEBHOOKS_WANTED)
    with Webhooks(sending_to(settings, receiver.url)):
        pass
    assert 0 < connection.ttl(keys.WEBHOOKS_WANTED) <= keys.WEBHOOKS_TTL_S
    tell(connection, "video.created", "a")
    assert left(connection) == 1, "it waits for the next worker"


def test_a_video_that_is_refused_holds_up_no_other(
    settings: Settings, connection: redis.Redis, receiver: Receiver, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status["bad"] = 500
    tell_lives(connection, "bad", "a", "b")
    with Webhooks(sending_to(settings, receiver.url)):
        until(lambda: receiver.types("a") == receiver.types("b") == [*LIFE])
        assert {event["type"] for event in receiver.refused} == {"video.created"}
        until(lambda: outbox(connection).num_waiting == 4)
        assert outbox(connection).refusal == "was answered with 500"
        del receiver.status["bad"]
        until(lambda: receiver.types("bad") == [*LIFE])
        until(lambda: outbox(connection) == Outbox(num_waiting=0, oldest_at=None, refusal=""))
    assert receiver.accepted[-4]["id"] == receiver.refused[0]["id"], "the same event has the same id"
    assert "The webhook video.created of bad was answered with 500; it is sent again." in caplog.text
    assert left(connection) == 0


def test_a_receiver_that_is_away(
    settings: Settings, connection: redis.Redis, receiver: Receiver, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.close()
    videos = [f"v{number}" for number in range(20)]
    tell_lives(connection, *videos)
    with Webhooks(sending_to(settings, receiver.url)) as sender:
        until(lambda: "did not reach its receiver (Connection refused)" in caplog.text)
        until(lambda: sender._num_rounds >= 1)
        with contextlib.closing(Receiver(receiver.port)) as back:
            until(lambda: len(back.accepted) == 4 * len(videos))
            assert all(back.types(video) == [*LIFE] for video in videos)
    assert left(connection) == 0
    assert TOKEN not in caplog.text


def test_a_receiver_that_does_not_answer_harms_nobody(
    settings: Settings,
    connection: redis.Redis,
    receiver: Receiver,
    until: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "ANSWER_S", 1.0)
    receiver.hanging.add("bad")
    tell_lives(connection, "bad", "a", "b")
    with Webhooks(sending_to(settings, receiver.url)):
        until(lambda: receiver.types("a") == receiver.types("b") == [*LIFE])
    assert "The webhook video.created of bad was not answered within 1 s; it is sent again." in caplog.text
    assert left(connection) == 4


def test_an_end_waits_for_a_slow_receiver_for_a_while(
    settings: Settings, connection: redis.Redis, receiver: Receiver
) -> None:
    receiver.delay_s = 3600.0
    tell_lives(connection, "a")
    sender = Webhooks(sending_to(settings, receiver.url), close_s=0.1)
    with sender:
        pass
    assert sender._thread.is_alive()
    assert left(connection) == 4


def test_an_old_event_is_dropped_after_a_last_attempt(
    settings: Settings, connection: redis.Redis, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status["a"] = 400
    connection.xadd(keys.WEBHOOKS, {"type": "video.created", "id": "a"}, id="1000-1")
    connection.xadd(keys.WEBHOOKS, {"type": "video.created", "id": "b"}, id="1000-2")
    with Webhooks(sending_to(settings, receiver.url)):
        pass
    assert [event["data"]["id"] for event in receiver.refused] == ["a"]
    assert [(event["data"]["id"], event["created_at"]) for event in receiver.accepted] == [("b", 1)]
    assert "The webhook video.created of a was answered with 400 for a day; it is dropped." in caplog.text
    assert left(connection) == 0


def test_one_host_sends_at_a_time(settings: Settings, connection: redis.Redis, receiver: Receiver, until: Any) -> None:
    with Webhooks(sending_to(settings, receiver.url)) as first:
        until(lambda: connection.get(keys.WEBHOOKS_SENDER))
        with Webhooks(sending_to(settings, receiver.url)):
            tell_lives(connection, "a")
            until(lambda: left(connection) == 0)
            assert connection.get(keys.WEBHOOKS_SENDER) == first._name.encode()
    assert receiver.types("a") == [*LIFE]
    until(lambda: not connection.exists(keys.WEBHOOKS_SENDER))


@pytest.mark.slow
def test_kills_lose_no_event(
    settings: Settings, connection: redis.Redis, receiver: Receiver, until: Any, home: object
) -> None:
    receiver.delay_s = 0.02
    videos = [f"v{number}" for number in range(60)]
    environment = os.environ | sending_to(settings, receiver.url).environment()
    tell_lives(connection, *videos)
    for part in (60, 120, 180):
        command = [sys.executable, "-c", ENDLESS_SENDER]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as sender:
            try:
                until(lambda part=part: len(receiver.accepted) >= part)
            finally:
                sender.kill()
    assert left(connection) > 0, "it was killed before it was done"
    with Webhooks(sending_to(settings, receiver.url)):
        until(lambda: left(connection) == 0)
    by_id = {event["id"]: event for event in receiver.accepted}
    assert len(by_id) == 4 * len(videos), "those that were sent twice have the same id"
    assert len(receiver.accepted) - len(by_id) <= 3 * webhooks.NUM_AT_ONCE
    for video in videos:
        once = dict.fromkeys(event["id"] for event in receiver.accepted if event["data"]["id"] == video)
        assert [by_id[each]["type"] for each in once] == [*LIFE]


def test_a_redirect_is_not_followed(settings: Settings, connection: redis.Redis, receiver: Receiver) -> None:
    receiver.status["a"] = 307
    tell(connection, "video.created", "a")
    with Webhooks(sending_to(settings, receiver.url)):
        pass
    assert {*receiver.paths} == {f"/hooks?key={TOKEN}"}
    assert (len(receiver.accepted), left(connection)) == (0, 1)


def test_a_private_address_behind_a_public_name_gets_nothing(
    settings: Settings,
    connection: redis.Redis,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", receiver.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address)
    tell(connection, "video.created", "a")
    with Webhooks(sending_to(settings, f"http://hooks.example.com:{receiver.port}/")):
        pass
    assert receiver.paths == []
    assert "was not sent (127.0.0.1 is private" in caplog.text
    with Webhooks(sending_to(settings, f"http://localhost:{receiver.port}/")):
        pass
    assert receiver.paths == ["/"]


def test_without_a_url_nothing_is_started(settings: Settings, connection: redis.Redis) -> None:
    connection.delete(keys.WEBHOOKS_WANTED)
    before = threading.active_count()
    with Webhooks(settings):
        assert threading.active_count() == before
    assert not connection.exists(keys.WEBHOOKS_WANTED, keys.WEBHOOKS_SENDER)


def test_a_url_needs_a_secret(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(InputError, match="SVDQ_WEBHOOK_URL is set without SVDQ_WEBHOOK_SECRET"):
        Webhooks(settings.model_copy(update={"webhook_url": "https://example.com/"}))


@pytest.mark.slow
def test_a_worker_sends_the_events_of_its_videos(site: Any, receiver: Receiver, until: Any) -> None:
    a, b = site.submit(steps=40), site.submit(steps=40)
    hook = {"SVDQ_WEBHOOK_URL": receiver.url, "SVDQ_WEBHOOK_SECRET": SECRET}
    group = site.start(1, model="simulated:step_ms=20", **hook)
    until(lambda: receiver.types(a) == ["video.created", "video.started"], lambda: group.text)
    group.kill_all()
    second = site.start(1, model="simulated:step_ms=20", **hook)
    site.wait([a, b])
    site.connection.delete(f"rq:job:{b}")  # as if it had expired
    assert site.run("svdq", "remove", a, b, "--yes").returncode == 0
    assert second.stop(signal.SIGTERM)[0] == 0
    assert left(site.connection) == 0
    once = {event["id"]: (event["data"]["id"], event["type"]) for event in receiver.accepted}
    for video in (a, b):
        assert [event for of, event in once.values() if of == video] == [*LIFE]
    assert SECRET not in group.text + second.text
    assert TOKEN not in group.text + second.text
    for path in site.settings.home.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert SECRET.encode() not in data
            assert TOKEN.encode() not in data
