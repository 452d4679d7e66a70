"""Fixtures that start servers."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.serve.servers import TOKEN, Serve, Server


@pytest.fixture
def serve(home: Path) -> Iterator[Serve]:
    """Start servers, which end with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-m", "svdq.cli", "serve", *(arguments or ("--port", "0"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"SVDQ_SERVE_TOKEN": TOKEN, **os.environ, **environment},
        )
        running.append(process)
        assert process.stdout is not None
        line = ""
        while not line.startswith("Serving"):
            line = process.stdout.readline()
            assert line, process.wait()
        found = re.search(r"http://[^/\s]+", line)
        assert found is not None
        return Server(process, found[0], line=line)

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def photo_bytes(photo: Path) -> bytes:
    return photo.read_bytes()
