"""Hosts whose clocks are wrong, and a step of Redis' clock, take no job from a living group."""

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
import redis
from rq.job import JobStatus

from svdq.producer.connection import server_url
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.worker.queue import scripts
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import SILENT_S, Recovery
from svdq.worker.queue.rq_worker import LEASE_S
from tests.worker.jobs import Clock, leases, pop, put, waiting

#: A process on a host whose clock is wrong by so many seconds; `datetime` is where RQ and svdq read it.
SHIFTED = """
import gc
gc.disable()  # torch is imported below
import datetime, itertools, sys, time
url, shift_s = sys.argv[1], float(sys.argv[2])

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shift_s)

datetime.datetime = Shifted
true_time = time.time
time.time = lambda: true_time() + shift_s

import rq.utils
assert abs(rq.utils.now().timestamp() - true_time() - shift_s) < 1, "the clock is not shifted"
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_worker import LEASE_S
from svdq.worker.outages import connect

worker = GroupWorker(connect(url))
worker.start()
"""
#: It takes a job, holds it, fails another one that has a Retry, and does for a minute what a group does beside them.
WORKS = """
[held], [failed] = worker.take()[0], worker.take()[0]
worker.renew_leases([held, failed])
worker.fail(failed, "It broke.")
recovery = Recovery(worker, itertools.count(0, 100).__next__)
for _ in range(3):
    worker.renew_leases([held])
    recovery.expired()
    worker.maintain()
    worker.promote_due()
print(held.execution.composite_key)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shift_s", [3600 * 24 * 365, pytest.param(-3600 * 24 * 365, marks=pytest.mark.long)])
def test_a_host_with_a_wrong_clock_takes_and_queues_nothing_early(
    settings: Settings, connection: redis.Redis, worker: GroupWorker, shift_s: float
) -> None:
    put(connection, "a", "b", "c", "d")
    done, held = pop(worker), pop(worker)
    worker.finish([(done, {"outputs": []})])
    queue = SvdqQueue("svdq-default", connection=connection)
    queue.enqueue_at(datetime.now(UTC) + timedelta(seconds=300), RENDER, job_id="later")
    command = [sys.executable, "-c", SHIFTED + WORKS, server_url(settings), str(shift_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            worker.renew_leases([held])
            time.sleep(0.1)
        assert process.stdout is not None
        other = process.stdout.read().strip()
    assert process.returncode == 0

    assert leases(connection)[other] == pytest.approx(time.time() + LEASE_S, abs=15)
    assert worker.holds_lease(held)
    assert fetch(connection, "b").get_status() is JobStatus.STARTED
    assert connection.zscore("rq:finished:svdq-default", "a") is not None
    assert fetch(connection, "later").get_status() is JobStatus.SCHEDULED


def test_the_end_of_a_job_is_known_on_a_host_that_is_ahead(connection: redis.Redis, worker: GroupWorker) -> None:
    """RQ dates results by the clock of Redis and executions by that of their host."""
    put(connection, "a")
    active = pop(worker)
    active.execution.created_at = datetime.now(UTC) + timedelta(seconds=20)
    worker.finish([(active, {"outputs": []})])
    assert worker.confirm_end(active) is JobStatus.FINISHED


def test_a_step_of_redis_clock_takes_no_renewed_lease(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Redis all leases end at once; the living renew theirs within a beat, by the new time."""
    put(connection, "alive", "dead")
    alive = pop(worker)
    pop(dead)
    other = GroupWorker(connection)
    clock = Clock()
    recovery = Recovery(other, clock)
    recovery.expired()
    clock.now += SILENT_S / 2
    monkeypatch.setattr(scripts, "server_time", lambda connection: time.time() + 30)

    recovery.expired()
    assert len(leases(connection)) == 2
    worker.renew_leases([alive])
    clock.now += SILENT_S
    recovery.expired()
    assert list(leases(connection)) == [alive.execution.composite_key]
    assert waiting(connection) == ["dead"]

    monkeypatch.setattr(scripts, "server_time", lambda connection: time.time() - 30)
    worker.renew_leases([alive])
    clock.now += 3600
    recovery.expired()
    assert worker.holds_lease(alive)


def test_a_clock_that_was_set_back_keeps_no_job_of_a_dead_group(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, "alive", "dead")
    alive = pop(worker)
    pop(dead)
    monkeypatch.setattr(scripts, "server_time", lambda connection: time.time() - 86_400)
    clock = Clock()
    recovery = Recovery(GroupWorker(connection), clock)
    recovery.expired()
    worker.renew_leases([alive])
    clock.now += SILENT_S
    recovery.expired()
    assert len(leases(connection)) == 2
    clock.now += LEASE_S
    recovery.expired()
    assert list(leases(connection)) == [alive.execution.composite_key]
    assert waiting(connection) == ["dead"]


def test_a_group_takes_back_none_of_its_own(connection: redis.Redis, worker: GroupWorker) -> None:
    """Its own beat comes late, as after a stall of the whole host."""
    put(connection, "a")
    active = pop(worker)
    connection.zadd("rq:wip:svdq-default", {active.execution.composite_key: 1})
    clock = Clock()
    recovery = Recovery(worker, clock)
    for _ in range(3):
        recovery.expired()
        clock.now += 3600
    assert worker.holds_lease(active)
    assert worker.renew_leases([active]) == []


def test_leases_are_watched_anew_after_redis_was_away(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active = pop(worker)
    connection.zadd("rq:wip:svdq-default", {active.execution.composite_key: 1})
    clock = Clock()
    recovery = Recovery(GroupWorker(connection), clock)
    recovery.expired()
    clock.now += 3600  # for which nobody could reach Redis
    recovery.redis_failed()
    recovery.expired()
    assert worker.holds_lease(active)
    clock.now += SILENT_S
    recovery.expired()
    assert not worker.holds_lease(active)
