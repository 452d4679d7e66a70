"""The server's access to Redis: through a router that forgets idle connections, with another clock, and shared."""

import asyncio
import contextlib
import http.client
import re
import time

import anyio
import pytest
import redis

from svdq.cli.serve import backend
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from tests.cli.serve.servers import TYPE, Serve, Server, multipart
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


def test_one_read_for_all_who_ask_and_another_after_a_change_or_an_error() -> None:
    num_reads = 0

    async def read() -> int:
        nonlocal num_reads
        num_reads += 1
        await asyncio.sleep(0.05)
        if num_reads == 2:
            raise ValueError("away")
        return num_reads

    async def ask() -> None:
        shared = backend.Shared(read)
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        await shared.forget()
        with pytest.raises(ValueError, match="away"):
            await shared.get()
        leaving = asyncio.create_task(shared.get())
        await asyncio.sleep(0.02)
        leaving.cancel()
        assert await shared.get() == 4

    asyncio.run(ask())


@pytest.mark.slow
def test_open_pages_share_their_reads(server: Server, connection: redis.Redis) -> None:
    def num_commands(num_pages: int) -> int:
        """Return the commands to Redis until one of the open pages was updated twice."""
        with contextlib.ExitStack() as stack:
            for _ in range(num_pages):
                page = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                stack.callback(page.close)
                page.request("GET", "/page/events", headers=server.bearer)
                events = page.getresponse()
                assert events.read(1)
            before = int(connection.info("stats")["total_commands_processed"])
            num_updates = 0
            while num_updates < 2:
                line = events.readline()
                assert line, "the server has closed the connection"
                num_updates += line.startswith(b"data:")
            return int(connection.info("stats")["total_commands_processed"]) - before

    few, many = num_commands(1), num_commands(30)
    assert 0 < many < 2 * few + 100
