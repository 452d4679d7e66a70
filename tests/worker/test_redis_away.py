"""Redis goes away under a running group and comes back: what is in flight goes on, and its end is reported afterwards.

SVDQ_TEST_AWAY_S makes the absence longer than the few seconds of a test; `python -m tests.faults --campaign redis-gone`
is the same with more jobs, for ten minutes.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from svdq.producer.embedded_redis import PID, running_url, stop_server
from svdq.producer.queue import connect, fetch
from svdq.producer.settings_loader import load_settings
from tests.worker.own_redis import OwnRedis

pytestmark = pytest.mark.long

SIMULATED = "simulated:step_ms=50"
AWAY_S = float(os.environ.get("SVDQ_TEST_AWAY_S", "3"))


@pytest.fixture
def own_redis(house) -> Iterator[OwnRedis]:
    """A server of the user's own, which the house then uses."""
    folder = house.folder / "redis"
    folder.mkdir()
    server = OwnRedis(folder)
    house.connection.close()
    house.settings = load_settings(home=house.settings.home, redis_url=server.url())
    house.connection = connect(house.settings)
    yield server
    server.stop()


def check_all_finished(house, jobs: list[str]) -> None:
    """Nothing is lost, and nothing was done twice."""
    views = house.wait(jobs)
    assert [view.status for view in views] == ["finished"] * len(jobs), [view.error for view in views]
    assert {house.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}
    assert [len(fetch(house.connection, job_id).results()) for job_id in jobs] == [1] * len(jobs)
    text = house.groups[-1].text
    assert [text.count(f"Job {job_id} finished") for job_id in jobs] == [1] * len(jobs)
    assert "continues from step" not in text  # no video was begun twice
    assert house.connection.zcard("rq:wip:svdq-default") == 0
    sidecars = [path.name for path in (Path(house.settings.storage) / "outputs").glob("*.json")]
    assert sorted(sidecars) == sorted(f"photo-{job_id}.json" for job_id in jobs)


def test_a_server_of_ones_own_is_gone_for_a_while(house, until, own_redis: OwnRedis) -> None:
    jobs = [house.submit(steps=20) for _ in range(6)]
    group = house.start(2, "--redis-url", own_redis.url(), model=SIMULATED)
    until(lambda: house.states(jobs).count("started") >= 2)
    ranks = group.ranks()

    own_redis.stop(signal.SIGKILL)
    until(lambda: "Redis does not answer" in group.text, lambda: group.text)
    # A person is told, and nothing is half done.
    refused = house.run("svdq", "submit", house.photo, "--force", SVDQ_REDIS_URL=own_redis.url())
    assert refused.returncode != 0
    assert refused.stderr.startswith(f"Error: The Redis server {own_redis.url()} cannot be used")
    assert refused.stderr.count("\n") == 1
    time.sleep(AWAY_S)
    own_redis.start()

    check_all_finished(house, jobs)
    assert group.text.count("Redis is back.") >= 1
    assert "Traceback" not in group.text
    assert group.ranks() == ranks  # nobody had to start again


def test_a_short_restart_is_not_noticed_by_who_submits(house, own_redis: OwnRedis) -> None:
    own_redis.stop()
    starter = threading.Timer(1.0, own_redis.start)
    starter.start()
    submitted = house.run("svdq", "submit", house.photo, SVDQ_REDIS_URL=own_redis.url())
    starter.join()
    assert submitted.returncode == 0, submitted.stderr


@pytest.mark.usefixtures("own_server")
def test_the_embedded_server_is_started_again(house, until) -> None:
    """Here as after `svdq redis stop`; killed, in test_recovery.py."""
    jobs = [house.submit(steps=20) for _ in range(6)]
    group = house.start(2, model=SIMULATED)
    until(lambda: house.states(jobs).count("started") >= 2)
    ranks = group.ranks()
    pid = int((house.settings.home / "redis" / PID).read_text())
    assert stop_server(house.settings.home)
    until(lambda: running_url(house.settings.home))
    assert int((house.settings.home / "redis" / PID).read_text()) != pid

    check_all_finished(house, jobs)
    assert "Traceback" not in group.text
    assert group.ranks() == ranks
