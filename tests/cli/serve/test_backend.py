"""The server's connection to Redis: through a router that forgets idle connections, and with another clock."""

import re
import time

import anyio
import pytest
import redis

from svdq.cli.serve import backend
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from tests.cli.serve.servers import TYPE, Serve, multipart
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


AHEAD_S = 7200


def put_ahead(answer: bytes) -> bytes:
    """Add two hours to the seconds of an answer to TIME."""
    return re.sub(rb"(?<=\*2\r\n\$10\r\n)\d{10}(?=\r\n\$)", lambda found: str(int(found[0]) + AHEAD_S).encode(), answer)


@pytest.mark.slow
def test_times_are_by_the_clock_of_redis(
    serve: Serve, settings: Settings, connection: redis.Redis, photo_bytes: bytes
) -> None:
    with Proxy(settings.redis_url) as proxy:
        proxy.edit = put_ahead
        server = serve(SVDQ_REDIS_URL=proxy.url)
        headers = {**server.bearer, "Content-Type": TYPE}
        for path in ("/v1/videos", "/page/photos"):
            begin = connection.time()[0]
            answer = server.ask("POST", path, multipart(photo_bytes, family="svd", seed=len(path), at="+60s"), headers)
            found = answer.json
            job = view(connection, found["jobs"][0]["id"] if "jobs" in found else found["id"])
            assert job.scheduled_at is not None
            assert 0 <= job.scheduled_at.timestamp() - begin - AHEAD_S - 60 < 60
        proxy.shutdown()
