"""Jobs are queued when they are due, once, in order, whoever is killed: RQ's scheduler against a real Redis."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import redis
import rq
from rq.serializers import JSONSerializer

from svdq.producer import control, keys
from svdq.producer.embedded_redis.server import PID, ensure_server
from svdq.producer.job import Job
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.worker.jobs import handover
from svdq.worker.jobs.rq_adapter import GroupWorker
from svdq.worker.jobs.rq_worker import LEASE_S
from svdq.worker.jobs.scheduler import Scheduler
from svdq.worker.launching.group_process import environment_of

JOB = Job(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)
LOCKS = [f"rq:scheduler-lock:{name}" for name in keys.QUEUE_NAMES]

#: A launcher that does nothing but to have a scheduler.
LAUNCHER = """
import time
from svdq.producer.settings import Settings
from svdq.worker.launching.scheduler_process import SchedulerProcess
with SchedulerProcess(Settings.load()) as scheduler:
    while True:
        scheduler.supervise()
        time.sleep(0.1)
"""


def schedule(connection: redis.Redis, *job_ids: str, in_s: float = -10.0, priority: str = "default", **more) -> None:
    """Schedule jobs as any user of RQ does, all for the same time."""
    queue = SvdqQueue(f"svdq-{priority}", connection=connection)
    due_at = datetime.now(UTC) + timedelta(seconds=in_s)
    for job_id in job_ids:
        queue.enqueue_at(due_at, RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, **more)


def waiting(connection: redis.Redis, priority: str = "default") -> list[str]:
    return SvdqQueue(f"svdq-{priority}", connection=connection).get_job_ids()


def scheduled(connection: redis.Redis) -> list[bytes]:
    return connection.zrange("rq:scheduled:svdq-default", 0, -1)


def make_due(connection: redis.Redis, job_id: str) -> None:
    """Let the time pass until a job is due."""
    connection.zadd("rq:scheduled:svdq-default", {job_id: time.time() - 1}, xx=True)


@pytest.fixture
def scheduler(connection: redis.Redis) -> Iterator[Scheduler]:
    scheduler = Scheduler(connection)
    yield scheduler
    scheduler.stop()


# What is queued, and in which order.


def test_what_is_due_is_queued_by_priority_and_age(connection: redis.Redis, scheduler: Scheduler) -> None:
    schedule(connection, "z", "m", "a")  # the time is the same: the order is that of submission, not of the ids
    schedule(connection, "earlier", in_s=-20)
    schedule(connection, "urgent", priority="high")
    schedule(connection, "later", in_s=3600)
    assert waiting(connection) == []

    scheduler.tick()

    assert waiting(connection) == ["earlier", "z", "m", "a"]
    assert waiting(connection, "high") == ["urgent"]
    assert scheduled(connection) == [b"later"]
    job = fetch(connection, "z")
    assert job.get_status().value == "queued"
    assert job.enqueued_at is not None
    assert fetch(connection, "later").get_status().value == "scheduled"
    # To a group they are jobs as any others.
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print)
    assert [worker.pop().rq_job.id for _ in range(3)] == ["urgent", "earlier", "z"]


def test_a_job_for_the_front_goes_there(connection: redis.Redis, scheduler: Scheduler) -> None:
    SvdqQueue("svdq-default", connection=connection).enqueue(RENDER, job_id="waits")
    schedule(connection, "front", at_front=True)
    scheduler.tick()
    assert waiting(connection) == ["front", "waits"]


def test_many_jobs_are_queued_in_their_order(connection: redis.Redis, scheduler: Scheduler, monkeypatch) -> None:
    monkeypatch.setattr("svdq.worker.jobs.scheduler.CHUNK", 4)
    job_ids = [f"job{9 - number}" for number in range(10)]
    schedule(connection, *job_ids)
    assert scheduler.tick()
    assert len(waiting(connection)) == 4
    assert scheduler.tick()
    assert not scheduler.tick()  # nothing more at once
    assert waiting(connection) == job_ids


# Jobs that anyone may have changed.

CHANGES = {
    "cancelled": lambda connection: control.cancel(connection, "bad"),
    "cancelled by RQ": lambda connection: fetch(connection, "bad").cancel(),
    "deleted": lambda connection: connection.delete("rq:job:bad"),
    "no hash": lambda connection: (connection.delete("rq:job:bad"), connection.set("rq:job:bad", "x")),
    "begun": lambda connection: connection.hset("rq:job:bad", "status", "started"),
    "no id": lambda connection: connection.zadd("rq:scheduled:svdq-default", {b"\xff": 1}),
    "no registry": lambda connection: connection.set("rq:scheduled:svdq-high", "x"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_job_keeps_no_other_waiting(connection: redis.Redis, scheduler: Scheduler, what: str) -> None:
    schedule(connection, "bad", in_s=-100)
    schedule(connection, "good")
    CHANGES[what](connection)

    scheduler.tick()

    expected = ["bad", "good"] if what in ("no id", "no registry") else ["good"]
    assert waiting(connection) == expected
    assert scheduled(connection) == []


def test_a_job_that_rq_has_not_written_yet_is_not_lost(connection: redis.Redis, scheduler: Scheduler) -> None:
    """RQ registers a job at once and writes it with its pipeline."""
    with connection.pipeline() as pipeline:
        schedule(connection, "bulk", pipeline=pipeline)
        scheduler.tick()
        assert scheduled(connection) == [b"bulk"]
        pipeline.execute()
    scheduler.tick()
    assert waiting(connection) == ["bulk"]


def test_no_two_schedulers_queue_a_job_twice(connection: redis.Redis, scheduler: Scheduler) -> None:
    schedule(connection, "a")
    queue = SvdqQueue("svdq-default", connection=connection)
    with connection.pipeline() as pipeline:
        for _ in range(2):
            handover.promote(pipeline, queue, b"a", datetime.now(UTC))
        assert pipeline.execute() == [1, 0]
    assert waiting(connection) == ["a"]


# RQ's Retry with intervals.


def test_a_retry_with_an_interval_waits_for_it(connection: redis.Redis, scheduler: Scheduler) -> None:
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print)
    worker.start()
    queue = SvdqQueue("svdq-default", connection=connection)
    parameters = {"job": JOB.model_dump(mode="json")}
    queue.enqueue(RENDER, kwargs=parameters, job_id="a", retry=rq.Retry(max=2, interval=[60, 0]))

    worker.fail(worker.pop(), "The first time.")
    assert fetch(connection, "a").get_status().value == "scheduled"
    assert fetch(connection, "a").retries_left == 1
    assert connection.zscore("rq:scheduled:svdq-default", "a") == pytest.approx(time.time() + 60, abs=30)
    assert connection.zcard("rq:wip:svdq-default") == 0
    scheduler.tick()
    assert waiting(connection) == []

    make_due(connection, "a")
    scheduler.tick()
    assert waiting(connection) == ["a"]
    worker.fail(worker.pop(), "The second time.")
    assert waiting(connection) == ["a"]  # its second interval is none
    worker.fail(worker.pop(), "The last time.")

    job = fetch(connection, "a")
    assert job.get_status().value == "failed"
    assert job.latest_result().exc_string == "The last time."
    assert (waiting(connection), scheduled(connection), connection.zcard("rq:wip:svdq-default")) == ([], [], 0)
    worker.end()


def test_a_retry_may_go_to_the_front(connection: redis.Redis, scheduler: Scheduler) -> None:
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print)
    worker.start()
    queue = SvdqQueue("svdq-default", connection=connection)
    retry = rq.Retry(max=1, interval=60, enqueue_at_front=True)
    for job_id in ("a", "b"):
        queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, retry=retry)
    worker.fail(worker.pop(), "It broke.")
    make_due(connection, "a")
    scheduler.tick()
    assert waiting(connection) == ["a", "b"]
    worker.end()


@pytest.mark.parametrize("intervals", ['["x"]', "[-5]", '{"a": 1}', "[1e300]", "7"])
def test_a_senseless_interval_is_none(connection: redis.Redis, intervals: str) -> None:
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print)
    worker.start()
    queue = SvdqQueue("svdq-default", connection=connection)
    queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id="a", retry=rq.Retry(max=2))
    connection.hset("rq:job:a", "retry_intervals", intervals)
    worker.fail(worker.pop(), "It broke.")
    assert fetch(connection, "a").get_status().value == "failed"
    worker.end()


def test_a_stopped_job_is_not_retried(connection: redis.Redis) -> None:
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print)
    worker.start()
    queue = SvdqQueue("svdq-default", connection=connection)
    retry = rq.Retry(max=2, interval=60)
    queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id="a", retry=retry)
    worker.stop(worker.pop())
    assert fetch(connection, "a").get_status().value == "stopped"
    assert scheduled(connection) == []
    worker.end()


# Several of them, and their ends.


def test_one_of_several_works_and_another_takes_over(connection: redis.Redis, scheduler: Scheduler) -> None:
    scheduler.tick()
    other = Scheduler(connection)
    schedule(connection, "a")
    other.tick()
    assert other.acquired_locks == set()
    assert waiting(connection) == []

    assert all(0 < connection.ttl(lock) <= LEASE_S for lock in LOCKS)  # another host waits no longer
    scheduler.stop()
    assert connection.exists(*LOCKS) == 0
    other.acquire_locks()
    other.tick()
    assert waiting(connection) == ["a"]
    other.stop()


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: list["subprocess.Popen[bytes]"], *arguments: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.DEVNULL)
    processes.append(process)
    return process


def test_the_lock_of_a_killed_one_is_free_at_once(connection: redis.Redis, scheduler, processes, until) -> None:
    process = start(processes, "-m", "svdq.worker.jobs.scheduler")
    until(lambda: connection.exists(*LOCKS) == 3)
    process.kill()
    process.wait()
    assert connection.exists(*LOCKS) == 3
    schedule(connection, "a")
    scheduler.tick()
    assert waiting(connection) == ["a"]


def test_it_goes_on_when_redis_is_back_and_ends_in_order(home: Path, connection: redis.Redis, processes, until) -> None:
    process = start(processes, "-m", "svdq.worker.jobs.scheduler")
    until(lambda: connection.exists(*LOCKS) == 3)
    schedule(connection, "a", in_s=2)
    server = psutil.Process(int((home / "redis" / PID).read_text()))
    server.kill()
    psutil.wait_procs([server], timeout=20)
    # Whoever is first starts it again.
    ensure_server(home)
    until(lambda: waiting(connection) == ["a"])

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert connection.exists(*LOCKS) == 0
    assert list(connection.scan_iter("rq:scheduler*")) == []


def test_a_launcher_has_one_starts_it_again_and_leaves_none(connection, processes, until, no_processes_left) -> None:
    launcher = start(processes, "-c", LAUNCHER)
    family = psutil.Process(launcher.pid)
    first = until(lambda: connection.exists(*LOCKS) == 3 and family.children())[0]
    holder = connection.get(LOCKS[0])
    first.kill()
    until(lambda: connection.get(LOCKS[0]) not in (holder, None))
    second = family.children()[0]
    assert second.pid != first.pid

    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs([second], timeout=30)
    assert alive == []
    no_processes_left([first, second])
    until(lambda: connection.exists(*LOCKS) == 0)  # it has given them back


@pytest.mark.slow
def test_a_burst_renders_what_is_due_and_says_what_is_left(house, no_processes_left) -> None:
    job = fetch(house.connection, house.submit()).kwargs
    queue = SvdqQueue("svdq-default", connection=house.connection)
    now = datetime.now(UTC)
    queue.enqueue_at(now - timedelta(hours=1), RENDER, kwargs=job, job_id="due")
    for job_id in ("later", "much-later"):
        queue.enqueue_at(now + timedelta(hours=1), RENDER, kwargs=job, job_id=job_id)

    group = house.start(1, "--burst")
    family = psutil.Process(group.process.pid).children(recursive=True)
    assert any("svdq.worker.jobs.scheduler" in process.cmdline() for process in family)
    assert group.end() == 0

    assert house.view("due").status == "finished"
    assert house.states(["later", "much-later"]) == ["scheduled"] * 2
    assert "The queue is empty; scheduled for later: 2." in group.text
    assert "[scheduler] 1 job was due, in svdq-default." in group.text
    no_processes_left(family)


def test_settings_reach_the_scheduler_as_they_reach_ranks(home: Path) -> None:
    """Its queue is that of the launcher's flags, not of the environment."""
    settings = Settings.load(redis_url="redis://:secret@127.0.0.1:1/0", callbacks=("a.b", "c.d"))
    environment = environment_of(settings)
    assert environment["SVDQ_REDIS_URL"] == settings.redis_url
    assert environment["SVDQ_CALLBACKS"] == "a.b,c.d"


def test_a_job_of_ours_is_json_when_it_comes_out(connection: redis.Redis, scheduler: Scheduler) -> None:
    schedule(connection, "a")
    before = connection.hget("rq:job:a", "data")
    scheduler.tick()
    assert connection.hget("rq:job:a", "data") == before
    assert rq.job.Job.fetch("a", connection=connection, serializer=JSONSerializer).kwargs["job"]["seed"] == 1
