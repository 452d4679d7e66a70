"""Fixtures: a home of its own for a test, with a real Redis server that ends with it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.queue import session
from svdq.producer.redis_server import stop_server
from svdq.producer.settings import Settings

#: `svdq` as a user runs it.
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SVDQ_HOME of this test; nothing else is set, and the working folder is empty."""
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SVDQ_HOME", str(folder))
    yield folder
    stop_server(folder)


@pytest.fixture
def settings(home: Path) -> Settings:
    return Settings.load()


@pytest.fixture
def connection(settings: Settings) -> Iterator[redis.Redis]:
    with session(settings) as connection:
        yield connection


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A small photograph-like JPEG."""
    path = tmp_path / "a photo.jpg"
    Image.effect_noise((320, 200), 60).convert("RGB").save(path, quality=90)
    return path


@pytest.fixture
def svdq(home: Path) -> Cli:
    """Run `svdq` in a process of its own."""

    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", "from svdq.cli.main import main; main()", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )

    return run
