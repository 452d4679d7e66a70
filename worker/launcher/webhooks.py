"""Sends the events of videos from their outbox in Redis to the webhook of the settings, as Standard Webhooks describes.

One host sends at a time. An event leaves the outbox when the receiver has accepted it, so a kill loses none and at most
sends one again, with the same id. Events of a video are sent one after the other; one that is not accepted holds up no
other video, and is sent again for a day.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import redis

from svdq.pipeline.errors import InputError
from svdq.producer import keys, lua, processes
from svdq.producer.connection import server_url
from svdq.producer.settings import Settings
from svdq.producer.threads import ordered_map, within
from svdq.worker.outages import connect

logger = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two looks into an outbox without events that are due
ANSWER_S = 10.0  # seconds that the receiver has for an answer
SENDER_MS = 15_000  # after which another host sends, unless this one has said again that it does
RENEW_S = 4.0  # seconds between two times that it says so; less would write to the disk of an idle Redis more often
CLOSE_S = 10.0  # seconds that the end of a run waits until the events are sent; systemd grants few more
NUM_AT_ONCE = 8  # events that are sent at the same time, of different videos
NUM_ALIKE = 3  # videos whose events are not accepted in a row before the receiver as a whole is tried less often
LONGEST_DELAY_S = 300.0  # until an event is sent again: 1 s, doubling up to this
PAGE = 100  # events that are read at once


class StoredEvent(NamedTuple):
    """An event in the outbox."""

    entry: str  # its id there: milliseconds by the clock of Redis, a number
    type: str
    video: str

    @classmethod
    def of(cls, entry: bytes, fields: Mapping[bytes, bytes]) -> "StoredEvent":
        """Read an entry of the stream, which anyone with access to Redis may have written."""
        parts = (entry, fields.get(b"type", b""), fields.get(b"id", b""))
        return cls(*(part.decode(errors="replace") for part in parts))

    @property
    def id(self) -> str:
        """The same at each attempt; of no other event, also of another outbox."""
        return f"evt_{hashlib.sha256(f'{self.entry} {self.video} {self.type}'.encode()).hexdigest()[:32]}"

    @property
    def created_s(self) -> int:
        """When it was written, in seconds since the epoch."""
        return int(self.entry.partition("-")[0]) // 1000

    def body(self) -> bytes:
        """Return the event as OpenAI's webhooks have it."""
        values = {"id": self.id, "object": "event", "created_at": self.created_s, "type": self.type}
        return json.dumps(values | {"data": {"id": self.video}}).encode()


class Webhooks:
    """The webhook of this host, as a context manager that sends in a thread; without a URL it does nothing."""

    def __init__(self, settings: Settings, *, close_s: float = CLOSE_S) -> None:
        """Read the settings; raise an InputError if there is a URL and no secret."""
        self._settings = settings
        self._close_s = close_s
        self._receiver = Receiver.of(settings)
        self._name = processes.worker_name()
        self._renew_at_s = 0.0
        self._closing = threading.Event()
        self._set_aside: dict[str, tuple[int, float]] = {}  # by video: attempts of its next event, when it is due
        self._failing: set[str] = set()  # videos of the attempts since the last event that was accepted
        self._num_rounds = 0  # of these attempts
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def __enter__(self) -> Self:
        if self._receiver:
            self._url = server_url(self._settings)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send what can be sent within `close_s`; the rest stays for the next worker."""
        self._closing.set()
        if self._receiver:
            self._thread.join(self._close_s)

    def _run(self) -> None:
        with connect(self._url) as connection:
            while True:
                is_last = self._closing.is_set()
                try:
                    wait_s = self._send_some(connection)
                except redis.RedisError as error:
                    logger.debug("The outbox of webhooks cannot be read at present: %s", type(error).__name__)
                    wait_s = POLL_S
                if is_last and wait_s:
                    break
                self._closing.wait(wait_s)
            with suppress(redis.RedisError):
                self._hold(connection, 1)

    def _hold(self, connection: redis.Redis, lasting_ms: int) -> bool:
        """Be the host that sends, for so many milliseconds; return whether it is."""
        held_by: Any = connection.get(keys.WEBHOOKS_SENDER)
        gone = held_by if held_by and processes.is_gone(held_by.decode(errors="replace")) else b""
        names = (keys.WEBHOOKS_SENDER, keys.WEBHOOKS_WANTED, keys.WEBHOOKS)
        sender = lua.run(connection, "hold_outbox", names, self._name, gone, lasting_ms, keys.WEBHOOKS_TTL_S)
        return bool(sender == self._name.encode())

    def _is_sender(self, connection: redis.Redis) -> bool:
        """Return whether this host sends, until the receiver has answered."""
        now_s = time.monotonic()
        if now_s >= self._renew_at_s and self._hold(connection, SENDER_MS):
            self._renew_at_s = now_s + RENEW_S
        return now_s < self._renew_at_s

    def _send_some(self, connection: redis.Redis) -> float:
        """Send the next events; return the seconds to wait after that, 0 if more may be due."""
        if not self._is_sender(connection):
            return POLL_S
        assert self._receiver is not None
        events = self._due(connection, 1 if self._failing else NUM_AT_ONCE)
        if not events:
            return POLL_S
        answers = list(ordered_map(self._receiver.post, events, num_threads=len(events)))
        done, are_new = [], not self._set_aside
        for event, refusal in zip(events, answers, strict=True):
            attempts, _ = self._set_aside.pop(event.video, (0, 0.0))
            if not refusal:
                self._failing.clear()
                self._num_rounds = 0
                done.append(event.entry)
                continue
            if are_new:
                logger.warning("The webhook %s of %s %s; it is sent again.", event.type, event.video, refusal)
                are_new = False
            self._failing.add(event.video)
            if time.time() - event.created_s > keys.DAY_S:
                logger.warning("The webhook %s of %s %s for a day; it is dropped.", event.type, event.video, refusal)
                done.append(event.entry)
            else:
                self._set_aside[event.video] = (attempts + 1, time.monotonic() + _delay_s(attempts))
        if done:
            connection.xdel(keys.WEBHOOKS, *done)
        if refusals := list(filter(None, answers)):
            connection.set(keys.WEBHOOKS_REFUSAL, refusals[-1], ex=keys.WEBHOOKS_REFUSAL_TTL_S)
        elif not self._set_aside:
            connection.delete(keys.WEBHOOKS_REFUSAL)
        if len(self._failing) < NUM_ALIKE:
            return 0.0
        self._num_rounds += 1
        return _delay_s(self._num_rounds)

    def _due(self, connection: redis.Redis, number: int) -> list[StoredEvent]:
        """Return the next event of each of so many videos, oldest first, without those that are sent again later."""
        now_s = time.monotonic()
        passed = {video for video, (_, due_s) in self._set_aside.items() if due_s > now_s}
        found: list[StoredEvent] = []
        page: Any = connection.xrange(keys.WEBHOOKS, count=PAGE)
        while page:
            for entry, fields in page:
                event = StoredEvent.of(entry, fields)
                if event.video not in passed:
                    passed.add(event.video)
                    found.append(event)
                if len(found) == number:
                    return found
            page = connection.xrange(keys.WEBHOOKS, b"(" + page[-1][0], count=PAGE)
        return found


def _delay_s(attempts: int) -> float:
    return float(min(2.0 ** min(attempts, 30), LONGEST_DELAY_S))


class Receiver:
    """Who gets the events: the URL of the settings, over connections that follow no redirects."""

    def __init__(self, url: str, secret: str) -> None:
        """Take a URL and a secret that `Settings` has checked."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._key = base64.b64decode(secret.removeprefix("whsec_"))
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._may_be_private = _names_private(self._host)

    @classmethod
    def of(cls, settings: Settings) -> "Receiver | None":
        """Return the receiver of the settings, None without one; raises InputError if there is no secret."""
        if settings.webhook_url is None:
            return None
        if settings.webhook_secret is None:
            raise InputError(
                "SVDQ_WEBHOOK_URL is set without SVDQ_WEBHOOK_SECRET, by which the receiver knows that events are "
                'real; set it, such as to "whsec_$(openssl rand -base64 32)".'
            )
        return cls(settings.webhook_url, settings.webhook_secret)

    def post(self, event: StoredEvent) -> str:
        """Send an event; return "" if it was accepted, else how it was not, as the end of a sentence."""
        connection = (
            HTTPConnection(self._host, self._port, timeout=ANSWER_S)
            if self._tls is None
            else HTTPSConnection(self._host, self._port, timeout=ANSWER_S, context=self._tls)
        )
        end_s = time.monotonic() + ANSWER_S

        def ask() -> str:
            connection.connect()
            address = ipaddress.ip_address(connection.sock.getpeername()[0].partition("%")[0])
            if not self._may_be_private and not address.is_global:
                return f"was not sent ({address} is private, and SVDQ_WEBHOOK_URL has a name in place of it)"
            if time.monotonic() > end_s:  # the caller has given up, and will send it again
                raise TimeoutError
            body = event.body()
            connection.request("POST", self._path, body, self._headers(event, body))
            status = connection.getresponse().status
            return "" if 200 <= status < 300 else f"was answered with {status}"

        try:
            return within(ANSWER_S, ask)
        except TimeoutError:
            return f"was not answered within {ANSWER_S:.0f} s"
        except (OSError, HTTPException, ValueError) as error:  # their texts may have parts of the URL
            reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            return f"did not reach its receiver ({reason})"
        finally:
            if connection.sock is not None:
                with suppress(OSError):  # ends the thread of an answer that is late
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _headers(self, event: StoredEvent, body: bytes) -> dict[str, str]:
        """Return the headers of Standard Webhooks for an attempt now."""
        now_s = str(int(time.time()))
        signed = hmac.digest(self._key, b".".join((event.id.encode(), now_s.encode(), body)), "sha256")
        return {
            "content-type": "application/json",
            "user-agent": "svdq",
            "webhook-id": event.id,
            "webhook-timestamp": now_s,
            "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
        }


def _names_private(host: str) -> bool:
    """Return whether a host is an address, or a name that exists only in a private network."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return "." not in host or host.endswith((".localhost", ".local", ".internal", ".home.arpa"))
