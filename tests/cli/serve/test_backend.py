"""The server's connection to Redis through a router that forgets idle connections."""

import time

import anyio
import redis

from svdq.cli.serve import backend
from svdq.producer.settings import Settings
from tests.proxy import Proxy


def test_the_first_request_after_a_pause_is_answered(settings: Settings, monkeypatch) -> None:
    assert settings.redis_url is not None
    monkeypatch.setattr(backend, "IDLE_S", 0.2)
    with Proxy(settings.redis_url) as router:
        served = backend.Backend(settings.model_copy(update={"redis_url": router.url}))

        def ping(connection: redis.Redis) -> bool:
            return bool(connection.ping())

        assert anyio.run(served.read, ping)
        router.forget()
        time.sleep(0.5)
        assert anyio.run(served.read, ping)
        router.shutdown()
