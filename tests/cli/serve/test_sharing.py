"""Reads that many requests share."""

import asyncio
import contextlib
import http.client

import pytest
import redis

from svdq.cli.serve.backend import Shared
from tests.cli.serve.servers import Server

pytestmark = pytest.mark.slow


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
        shared = Shared(read)
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        await shared.forget()
        with pytest.raises(ValueError, match="away"):
            await shared.get()
        leaving = asyncio.create_task(shared.get())
        await asyncio.sleep(0.02)
        leaving.cancel()
        assert await shared.get() == 4

    asyncio.run(ask())


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
