"""Notifications through apprise to an HTTP server of the test's; without torch."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer import keys
from svdq.producer.pauses import pause
from svdq.producer.results.run_report import summarize
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import Condition, IntakeStatus
from svdq.worker.launcher.notifications import Notifications
from tests.producer.status.test_ranks import rank


class Server:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status, self.delay_s = 200, 0.0
        self._closing = closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                closing.wait(outer.delay_s)
                outer.received.append(json.loads(body))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://user:s3cret@127.0.0.1:{self._server.server_address[1]}/t0ken"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.received]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def wanting(settings: Settings, *urls: str) -> Settings:
    return settings.model_copy(update={"notify": urls})


def report_of(seconds: float = 0.0):
    now = datetime.now().astimezone()
    return summarize([], {"queued": 2}, since=now, until=now, ending="It ended because the queue was empty.")


def test_the_summary_is_sent_before_the_end(settings: Settings, server: Server) -> None:
    with Notifications(wanting(settings, server.url)) as notifications:
        assert notifications.are_wanted
        notifications.send_summary(report_of())
    [message] = server.received
    assert message["title"].endswith(": 0 finished, 0 failed")
    assert "It ended because the queue was empty." in message["message"]
    assert "Left: " in message["message"]


def test_without_urls_nothing_is_started(settings: Settings) -> None:
    before = threading.active_count()
    with Notifications(settings) as notifications:
        assert not notifications.are_wanted
        assert threading.active_count() == before
        notifications.send("a", "b")


def test_a_pause_after_failures_and_a_full_disk_are_sent_once(
    settings: Settings, connection: redis.Redis, server: Server, until: Any, publish: Any
) -> None:
    pause(connection)  # by a person, who knows
    with Notifications(wanting(settings, server.url), poll_s=0.05):
        connection.set("rq:worker:group0", "1")
        connection.hset(keys.PAUSES, "group0", "3 jobs failed alike: no space.")
        publish(Condition(effect="Videos wait to be written", reason="No space left.", since=time.time(), attempts=3))
        until(lambda: len(server.received) >= 2)
        time.sleep(0.3)
    titles = sorted(title.partition(" on ")[2].partition(" ")[2] for title in server.titles)
    assert len(titles) == 2
    texts = sorted(message["message"] for message in server.received)
    assert texts[0].startswith("PAUSED group0: 3 jobs failed alike: no space.")
    assert texts[1] == "Videos wait to be written: No space left."


def test_the_return_of_the_storage_is_sent_once(settings: Settings, server: Server, until: Any, publish: Any) -> None:
    with Notifications(wanting(settings, server.url), poll_s=0.05):
        publish(Condition(effect="Videos wait to be written", reason="No answer.", since=time.time(), attempts=1))
        until(lambda: len(server.received) >= 1)
        publish()
        until(lambda: len(server.received) >= 2)
        publish(failed_gpus={"GPU 3": "it hangs"})
        until(lambda: len(server.received) >= 3)
    assert [title.partition(": ")[2] for title in server.titles] == [
        "Videos wait to be written",
        "Videos wait to be written no longer",
        "GPU 3 has failed",
    ]


def test_each_gpu_that_fails_is_sent(settings: Settings, server: Server, until: Any, publish: Any) -> None:
    with Notifications(wanting(settings, server.url), poll_s=0.05):
        for failed in ({"GPU 3": "it hangs"}, {"GPU 3": "it hangs", "GPU 5": "it is lost"}):
            publish(failed_gpus=failed)
            until(lambda failed=failed: len(server.received) >= len(failed))
    assert [title.partition(": ")[2] for title in server.titles] == ["GPU 3 has failed", "GPU 5 has failed"]
    assert "has failed (it is lost)" in server.received[1]["message"]


@pytest.fixture
def publish(connection: redis.Redis) -> Any:
    """Write the record of a rank of this host with a condition."""

    def publish(condition: Condition | None = None, **of_group: Any) -> None:
        rank(
            0,
            num_ranks=1,
            host=socket.gethostname(),
            pid=os.getpid(),
            at=time.time(),
            conditions=() if condition is None else (condition,),
            intake=IntakeStatus(worker="w", **of_group),
        ).save(connection)

    return publish


def test_the_reason_of_a_failed_run_is_sent(settings: Settings, server: Server) -> None:
    with pytest.raises(UnavailableError), Notifications(wanting(settings, server.url)):
        raise UnavailableError("The storage cannot be reached.")
    assert [message["message"] for message in server.received] == ["The storage cannot be reached."]
    assert server.titles[0].endswith(" failed")


def test_services_that_are_away_slow_or_refuse_do_not_hold_up_a_run(
    settings: Settings, server: Server, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.status = 500
    with contextlib.closing(Server()) as slow:
        slow.delay_s = 60.0
        urls = ("json://user:s3cret@127.0.0.1:1/t0ken", server.url, slow.url)
        with Notifications(wanting(settings, *urls), close_s=1.0) as notifications:
            notifications.send("title", "text")
            until(lambda: "was not accepted" in caplog.text)
            began = time.monotonic()
        assert time.monotonic() - began < slow.delay_s
    assert "s3cret" not in caplog.text
    assert "t0ken" not in caplog.text


@pytest.mark.parametrize("url", ["nonsense-s3cret", "foo://s3cret/x", "json://", "slack://s3cret"])
def test_a_url_that_is_wrong_is_one_sentence_without_secrets(settings: Settings, server: Server, url: str) -> None:
    with pytest.raises(InputError, match="The notification URL number 2 ") as caught:
        Notifications(wanting(settings, server.url, url))
    assert "s3cret" not in str(caught.value)
