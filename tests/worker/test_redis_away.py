"""Commands while Redis is away; `python -m tests.faults --campaign redis-gone` takes it from a running group."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.own_redis import OwnRedis

pytestmark = pytest.mark.slow


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder)
    yield server
    server.stop()


def test_submit_waits_for_a_restart_of_redis(site, own_redis: OwnRedis) -> None:
    own_redis.stop()
    starter = threading.Timer(1.0, own_redis.start)
    starter.start()
    submitted = site.run("svdq", "submit", site.photo, SVDQ_REDIS_URL=own_redis.url())
    starter.join()
    assert submitted.returncode == 0, submitted.stderr


def test_a_service_waits_for_redis_and_says_so_once(site, own_redis: OwnRedis, until) -> None:
    own_redis.stop()
    group = site.start(1, wait=False, SVDQ_REDIS_URL=own_redis.url())
    until(lambda: "The worker waits for it." in group.text, lambda: group.text)
    own_redis.start()
    group.ready()
    assert group.text.count("The worker waits for it.") == 1
