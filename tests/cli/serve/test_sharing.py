"""Reads that many requests share."""

import asyncio
import contextlib
import http.client
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from svdq.cli.serve.backend import Shared
from tests.cli.serve.servers import Server

pytestmark = pytest.mark.slow


def test_one_read_for_all_who_ask() -> None:
    reads = []

    async def read(key: str) -> int:
        reads.append(key)
        await asyncio.sleep(0.1)
        return len(reads)

    async def ask() -> list[int]:
        shared = Shared(read)
        first = await asyncio.gather(*(shared.get("a") for _ in range(50)))
        second = [await shared.get("a"), await shared.get("b")]
        shared.forget("a")
        return [*first, *second, await shared.get("a")]

    assert asyncio.run(ask()) == [1] * 51 + [2, 3]
    assert reads == ["a", "b", "a"]


def test_a_client_that_leaves_does_not_end_the_read_of_others() -> None:
    async def read(_key: None) -> str:
        await asyncio.sleep(0.1)
        return "read"

    async def ask() -> str:
        shared = Shared(read)
        leaving = asyncio.create_task(shared.get(None))
        staying = asyncio.create_task(shared.get(None))
        await asyncio.sleep(0.02)
        leaving.cancel()
        return await staying

    assert asyncio.run(ask()) == "read"


def test_an_error_reaches_all_and_is_not_kept() -> None:
    reads = 0

    async def read(_key: None) -> str:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.05)
        if reads == 1:
            raise ValueError("away")
        return "there"

    async def ask() -> None:
        shared = Shared(read)
        found = await asyncio.gather(*(shared.get(None) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in found] == ["away"] * 3
        assert await shared.get(None) == "there"

    asyncio.run(ask())


@pytest.mark.parametrize("num_clients", [1, 20])
def test_polls_of_the_same_video_are_read_once_a_second(
    server: Server, photo_bytes: bytes, connection: redis.Redis, num_clients: int
) -> None:
    video_id = server.create(photo_bytes).json["id"]
    server.get(f"/v1/videos/{video_id}")

    def num_commands() -> int:
        return int(connection.info("stats")["total_commands_processed"])

    before = num_commands()
    with ThreadPoolExecutor(num_clients) as pool:
        answers = list(pool.map(server.get, [f"/v1/videos/{video_id}"] * 10 * num_clients))
    assert {answer.json["id"] for answer in answers} == {video_id}
    # A look at one job and the snapshot of the server take about sixty commands; a look for each poll, thousands.
    assert num_commands() - before < 400


def test_open_pages_share_their_reads(server: Server, connection: redis.Redis) -> None:
    def num_commands(num_pages: int) -> int:
        """Return the commands to Redis until one of the open pages was updated four times."""
        with contextlib.ExitStack() as stack:
            for _ in range(num_pages):
                page = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                stack.callback(page.close)
                page.request("GET", "/page/events", headers=server.bearer)
                events = page.getresponse()
                assert events.read(1)
            before = int(connection.info("stats")["total_commands_processed"])
            num_updates = 0
            while num_updates < 4:
                line = events.readline()
                assert line, "the server has closed the connection"
                num_updates += line.startswith(b"data:")
            return int(connection.info("stats")["total_commands_processed"]) - before

    few, many = num_commands(1), num_commands(30)
    assert 0 < many < 2 * few + 100
