"""Fixtures that start servers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.serve.servers import TOKEN, Serve, Server
from tests.forks import Fork
from tests.waiting import wait_until


@pytest.fixture
def serve(home: Path, tmp_path: Path) -> Iterator[Serve]:
    """Start servers, which end with the test."""
    running: list[Fork] = []

    def start(*arguments: str, **environment: str) -> Server:
        output = tmp_path / f"serve{len(running)}.log"
        output.touch()
        given = {"SVDQ_SERVE_TOKEN": TOKEN, **environment}
        process = Fork(["serve", *(arguments or ("--port", "0"))], output, output, **given)
        running.append(process)
        wait_until(lambda: "Serving" in output.read_text() or process.poll() is not None, output.read_text)
        found = re.search(r"^Serving.* (http://[^/\s]+).*\n", output.read_text(), re.MULTILINE)
        assert found is not None, output.read_text()
        return Server(process, found[1], output, line=found[0])

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def photo_bytes(photo: Path) -> bytes:
    return photo.read_bytes()
