"""The group's RQ worker against a real Redis: what RQ's own tools see of it, and that nothing foreign ever runs."""

import importlib
import itertools
import json
import pickle
import select
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import rq
import rq.command
import rq.executions
import rq.rate_limit
import rq.registry
import rq.results
import rq.serializers
import rq.suspension
import rq.utils
import rq.webhook
import rq.worker_registration
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from svdq.producer import job_control
from svdq.producer.connection import server_url
from svdq.producer.pauses import free, read_pauses, resume
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import read_workers
from svdq.producer.together import ask_one
from svdq.producer.untrusted_job import UntrustedJob
from svdq.worker.active_job import ActiveJob
from svdq.worker.queue import group_worker, recovery, scripts
from svdq.worker.queue.crashes import MAX_ID_LENGTH
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.rq_worker import LEASE_S, Command
from tests.worker.jobs import JOB, leases, lossy, pop, put, waiting
from tests.worker.own_redis import OwnRedis


def take(worker: GroupWorker, count: int = 1) -> list[ActiveJob]:
    active_jobs = [pop(worker) for _ in range(count)]
    assert None not in active_jobs
    return [active for active in active_jobs if active is not None]


def status_of(connection: redis.Redis, job_id: str) -> str:
    return str(fetch(connection, job_id).get_status().value)


# Several executions at once.


def test_several_executions_stand_in_rqs_registries(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b", "c")
    active_jobs = take(worker, 3)

    queue = SvdqQueue("svdq-default", connection=connection)
    assert sorted(rq.registry.StartedJobRegistry(queue=queue).get_job_ids()) == ["a", "b", "c"]
    assert set(leases(connection)) == {active.execution.composite_key for active in active_jobs}
    assert connection.llen(queue.intermediate_queue_key) == 0
    for active in active_jobs:
        job = fetch(connection, active.rq_job.id)
        assert job.get_status() is JobStatus.STARTED
        assert job.worker_name == worker.name
        assert [execution.worker_name for execution in job.get_executions()] == [worker.name]
    assert [(seen.name, seen.state) for seen in ask_one(connection, read_workers())[0]] == [(worker.name, "busy")]


def test_a_worker_with_nothing_in_flight_is_idle_again(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active_jobs = take(worker)
    worker.renew_leases(active_jobs)
    assert ask_one(connection, read_workers())[0][0].state == "busy"
    worker.finish([(active_jobs[0], {"outputs": []})])
    worker.renew_leases([])
    assert ask_one(connection, read_workers())[0][0].state == "idle"


def test_groups_share_what_waits(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b", "c", "d")
    put(connection, "high", priority="high")
    assert worker.take(0)[1].num_queued == 5
    other = GroupWorker(connection)
    other.start()
    assert worker.take(0)[1].num_queued == 2
    other.end()
    assert worker.take(0)[1].num_queued == 5


def test_a_begin_that_is_sent_again_is_the_same_begin(connection: redis.Redis, worker: GroupWorker) -> None:
    """redis-py sends a command again whose answer was lost with the connection."""
    put(connection, "a", "b")
    active = pop(worker)
    assert active is not None
    commands = connection.pipeline().set("svdq:again", "1")
    assert scripts.begin(connection, worker.name, active.execution, commands) == 1
    assert not connection.exists("svdq:again")
    scripts.pop(connection, worker.queues, worker.name)
    other = rq.executions.Execution("other", "b", connection=connection)
    assert scripts.begin(connection, "another worker", other, commands) == 0
    connection.hset("rq:job:b", "status", "canceled")
    assert scripts.begin(connection, worker.name, other, commands) == -1
    assert not connection.exists("svdq:again")


def test_jobs_are_taken_by_priority_and_then_by_age(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "low", priority="low")
    put(connection, "first", "second")
    put(connection, "high", priority="high")

    taken = []
    while (following := worker.take(0)[1].next) is not None:
        active = take(worker)[0]
        assert active.rq_job.id.encode() == following.job_id  # what is looked at is what is taken
        taken.append((active.rq_job.id, active.queue.name))
    assert taken == [("high", "svdq-high"), ("first", "svdq-default"), ("second", "svdq-default"), ("low", "svdq-low")]
    assert pop(worker) is None


def test_a_job_of_limited_life_does_not_expire_in_flight(connection: redis.Redis, worker: GroupWorker) -> None:
    queue = SvdqQueue("svdq-default", connection=connection)
    queue.enqueue_call(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id="a", ttl=1000)
    assert connection.ttl("rq:job:a") > 0
    take(worker)
    assert connection.ttl("rq:job:a") == -1


def test_at_maxmemory_rendering_stops_and_no_job_is_lost(
    own_server: Path, connection: redis.Redis, worker: GroupWorker
) -> None:
    put(connection, "finished", "failed", "abandoned", "queued")
    finished, failed, left = take(worker, 3)
    other = GroupWorker(connection)
    connection.config_set("maxmemory", 1)

    def is_refused(act: Callable[[], object]) -> None:
        with pytest.raises(redis.RedisError):
            act()

    is_refused(worker.take)
    is_refused(lambda: worker.renew_leases([finished, failed]))
    is_refused(lambda: worker.finish([(finished, {"outputs": []})]))
    is_refused(lambda: worker.fail(failed, "It broke."))
    # A script that removes before it adds is done whole.
    assert scripts.return_to_queue(connection, left.queue, left.execution)
    assert waiting(connection) == ["abandoned", "queued"]
    connection.config_set("maxmemory", 0)

    worker.finish([(finished, {"outputs": []})])
    worker.fail(failed, "It broke.")
    assert [status_of(connection, active.rq_job.id) for active in (finished, failed)] == ["finished", "failed"]
    assert [active.rq_job.id for active in take(other, 2)] == ["abandoned", "queued"]


# How executions end.


def test_success_is_rqs_success(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    first, second = take(worker, 2)
    worker.finish([(second, {"outputs": ["b.mp4"]})])

    job = fetch(connection, "b")
    assert job.get_status() is JobStatus.FINISHED
    assert job.return_value() == {"outputs": ["b.mp4"]}
    result = job.latest_result()
    assert result is not None
    assert (result.type, result.worker_name) == (result.Type.SUCCESSFUL, worker.name)
    assert job in rq.registry.FinishedJobRegistry(queue=second.queue)
    assert connection.ttl(job.key) > 0
    assert set(leases(connection)) == {first.execution.composite_key}
    assert worker.holds_lease(first)
    assert not worker.holds_lease(second)
    assert not connection.exists(second.execution.key)
    assert ask_one(connection, read_workers())[0][0].finished == 1


ENDS = {
    "success": lambda worker, active: worker.finish([(active, {"outputs": ["a.mp4"]})]),
    "failure": lambda worker, active: worker.fail(active, "It broke."),
    "stop": lambda worker, active: worker.stop(active),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_a_job_that_was_taken_away_is_not_written(
    connection: redis.Redis, worker: GroupWorker, end: str
) -> None:
    """A group may sleep past its lease; the next one to have the job writes its end."""
    put(connection, "a")
    active = take(worker)[0]
    scripts.return_to_queue(connection, active.queue, active.execution)
    assert ENDS[end](worker, active) in (False, [False])
    assert status_of(connection, "a") == "queued"
    assert waiting(connection) == ["a"]
    assert fetch(connection, "a").latest_result() is None
    assert connection.zcard("rq:failed:svdq-default") == 0
    assert worker.confirm_end(active) is None


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_written_when_the_lease_was_not_renewed_in_time(
    connection: redis.Redis, worker: GroupWorker, end: str
) -> None:
    """A full Redis refuses renewals; the records of executions expire, and nobody takes the jobs."""
    put(connection, "a")
    active = take(worker)[0]
    connection.delete(active.execution.key)
    assert ENDS[end](worker, active) in (True, [True])
    assert status_of(connection, "a") in ("finished", "failed", "stopped")
    assert not worker.holds_lease(active)


def test_failure_is_final_with_our_sentence(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    first, second = take(worker, 2)
    worker.fail(first, "The photo cannot be decoded; give a whole image file.")

    job = fetch(connection, "a")
    assert job.get_status() is JobStatus.FAILED
    assert job in rq.registry.FailedJobRegistry(queue=first.queue)
    result = job.latest_result()
    assert result is not None
    assert result.exc_string == "The photo cannot be decoded; give a whole image file."
    assert view(connection, "a").error == "The photo cannot be decoded; give a whole image file."
    assert waiting(connection) == []
    assert (job.retries_left, job.number_of_retries) == (3, None)
    assert set(leases(connection)) == {second.execution.composite_key}

    # The user may try it again, as any job of RQ's.
    rq.registry.FailedJobRegistry(queue=first.queue).requeue("a")
    assert take(worker)[0].rq_job.id == "a"


def test_a_job_that_stands_in_the_queue_twice_is_taken_once(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    connection.rpush("rq:queue:svdq-default", "a", "b")  # the answer to an enqueue was lost, and it was sent again
    first, second = take(worker, 2)
    worker.finish([(second, {"outputs": []})])
    assert pop(worker) is None
    assert waiting(connection) == []
    assert set(leases(connection)) == {first.execution.composite_key}
    assert [status_of(connection, job_id) for job_id in ("a", "b")] == ["started", "finished"]
    assert not connection.exists("svdq:popped")


def test_stop_is_rqs_stop(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    first, second = take(worker, 2)
    worker.stop(first)
    assert status_of(connection, "a") == "stopped"
    assert ask_one(connection, read_workers())[0][0].failed == 0
    assert waiting(connection) == []
    # Stopping one says nothing about the next.
    worker.fail(second, "It broke.")
    assert status_of(connection, "b") == "failed"
    assert ask_one(connection, read_workers())[0][0].failed == 1


def test_put_back_restores_the_order_and_spends_no_retry(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b", "c", "d", "e")
    put(connection, "urgent", priority="high")
    active_jobs = take(worker, 4)
    worker.finish([(active_jobs[1], {"outputs": []})])
    worker.return_to_queue(active_jobs)

    assert waiting(connection) == ["b", "c", "d", "e"]  # a has finished meanwhile
    assert waiting(connection, "high") == ["urgent"]
    assert leases(connection) == leases(connection, "high") == {}
    for job_id in ("urgent", "b", "c"):
        job = fetch(connection, job_id)
        assert job.get_status() is JobStatus.QUEUED
        assert (job.retries_left, job.number_of_retries) == (3, None)
    assert status_of(connection, "a") == "finished"
    assert [active.rq_job.id for active in take(worker, 5)] == ["urgent", "b", "c", "d", "e"]


def test_a_job_that_was_taken_away_is_neither_held_nor_put_back(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active = take(worker)[0]
    assert worker.holds_lease(active)
    assert scripts.return_to_queue(connection, active.queue, active.execution)
    assert waiting(connection) == ["a"]
    assert not worker.holds_lease(active)
    worker.return_to_queue([active])
    assert waiting(connection) == ["a"]


# Leases.


@pytest.mark.parametrize("key", ["rq:job:a", "rq:executions:a", "rq:execution:{}"])
def test_a_key_of_the_wrong_type_costs_its_job_alone(connection: redis.Redis, worker: GroupWorker, key: str) -> None:
    put(connection, "a", "b")
    active_jobs = take(worker, 2)
    key = key.format(active_jobs[0].execution.composite_key)
    connection.delete(key)
    connection.set(key, "x")
    before = leases(connection)[active_jobs[1].execution.composite_key]
    connection.zadd("rq:wip:svdq-default", {active_jobs[1].execution.composite_key: before - 9})
    assert worker.renew_leases(active_jobs) == active_jobs[:1]
    worker.forget(active_jobs[0])
    assert list(leases(connection)) == [active_jobs[1].execution.composite_key]
    assert leases(connection)[active_jobs[1].execution.composite_key] >= before


def test_a_key_of_the_wrong_type_costs_its_queued_job_alone(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    connection.set("rq:executions:a", "x")
    [active] = take(worker)
    assert active.rq_job.id == "b"
    assert connection.llen(active.queue.intermediate_queue_key) == 0


def test_the_pause_of_a_burst_holds_for_the_next_one(connection: redis.Redis, worker: GroupWorker) -> None:
    """Which KEDA starts half a minute later, under another name, and which would fail three more jobs."""
    put(connection, "a", "b")
    bursts = [GroupWorker(connection, is_burst=True) for _ in range(2)]
    bursts[0].start()
    bursts[0].pause("3 jobs failed.")
    bursts[0].end()
    recovery.Recovery(bursts[1]).at_start([])
    assert pop(bursts[1]) is None
    assert bursts[1].paused
    [paused] = read_pauses(connection)
    assert paused.text == "PAUSED bursts: 3 jobs failed. Fix the cause, then run `svdq resume`."
    assert take(worker)[0].rq_job.id == "a", "it is for bursts alone"
    resume(connection)
    assert take(bursts[1])[0].rq_job.id == "b"


def test_a_group_takes_nothing_while_its_host_is_freed(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    free(connection, socket.gethostname())
    assert pop(worker) is None
    assert worker.paused
    resume(connection, "another")
    assert pop(worker) is None
    resume(connection, socket.gethostname())
    free(connection, "another")
    assert take(worker)[0].rq_job.id == "a"


def test_a_beat_prolongs_every_lease(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    put(connection, "c", priority="low")
    active_jobs = take(worker, 3)
    for name in ("default", "low"):
        connection.zadd(f"rq:wip:svdq-{name}", dict.fromkeys(leases(connection, name), 1000.0))
    connection.expire(worker.key, 5)

    worker.renew_leases(active_jobs)

    scores = [*leases(connection).values(), *leases(connection, "low").values()]
    assert len(scores) == 3
    assert min(scores) > 1_000_000_000
    assert connection.ttl(worker.key) > 5
    assert all(0 < connection.ttl(active.execution.key) <= LEASE_S for active in active_jobs)


def test_a_beat_does_not_take_back_what_was_taken_away(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    kept, lost = take(worker, 2)
    connection.zrem("rq:wip:svdq-default", lost.execution.composite_key)
    worker.renew_leases([kept, lost])
    assert set(leases(connection)) == {kept.execution.composite_key}


def test_a_beat_after_a_long_outage_makes_whole_records(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active_jobs = take(worker)
    # What a server that was away for longer than the leases has forgotten.
    connection.delete(worker.key, active_jobs[0].execution.key)
    connection.srem("rq:workers", worker.key)

    worker.renew_leases(active_jobs)

    assert [(seen.name, seen.state) for seen in ask_one(connection, read_workers())[0]] == [(worker.name, "busy")]
    assert [execution.worker_name for execution in fetch(connection, "a").get_executions()] == [worker.name]


@pytest.mark.parametrize("by_rq", [True, False])
def test_neither_a_beat_nor_its_end_revives_a_deleted_job(
    connection: redis.Redis, worker: GroupWorker, by_rq: bool
) -> None:
    put(connection, "a", "b")
    active_jobs = take(worker, 2)
    if by_rq:
        fetch(connection, "a").delete()
    else:
        connection.delete("rq:job:a")
    assert worker.renew_leases(active_jobs) == active_jobs[:1]
    assert worker.finish([(active_jobs[0], {"outputs": []})]) == [False]
    worker.forget(active_jobs[0])
    assert not connection.exists("rq:job:a")
    assert leases(connection).keys() == {active_jobs[1].execution.composite_key}
    assert status_of(connection, "b") == "started"
    put(connection, "a")  # the same submission again
    assert waiting(connection) == ["a"]


# Nothing foreign runs.


class Trap:
    """A module that leaves a file behind when it is imported or called, and a port that nobody may knock at."""

    def __init__(self, folder: Path, port: socket.socket) -> None:
        self.marker = folder / "sprung"
        self.port = port
        folder.joinpath("svdq_trap.py").write_text(
            f"from pathlib import Path\ndef go(*args, **kwargs):\n    Path({str(self.marker)!r}).touch()\ngo()\n"
        )

    @property
    def url(self) -> str:
        return "http://{}:{}/".format(*self.port.getsockname())

    @property
    def pickle(self) -> bytes:
        return pickle.dumps(_Bomb(self.marker))

    def check(self) -> None:
        """Nothing happened, and it would have shown."""
        assert not self.marker.exists()
        with pytest.raises(BlockingIOError):
            self.port.accept()
        importlib.import_module("svdq_trap")
        assert self.marker.exists()
        self.marker.unlink()
        pickle.loads(self.pickle)
        assert self.marker.exists()


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    folder = tmp_path / "trap"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "svdq_trap", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.setblocking(False)
        yield Trap(folder, port)


def put_raw(connection: redis.Redis, function: object = RENDER, kwargs: object = None, **fields: object) -> None:
    """Enqueue the job `bad` as any client of Redis may, then write `fields` into its hash."""
    queue = SvdqQueue("svdq-default", connection=connection)
    options = {name: fields.pop(name) for name in ("on_success", "on_failure", "on_stopped") if name in fields}
    kwargs = {"job": JOB.model_dump(mode="json")} if kwargs is None else kwargs
    queue.enqueue_call(function, kwargs=kwargs, job_id="bad", **options)
    if fields:
        connection.hset("rq:job:bad", mapping=fields)


def webhook(trap: Trap) -> str:
    return json.dumps([{"url": trap.url, "job_status": "failed"}])


def with_values(**values: object) -> dict[str, object]:
    return {"kwargs": {"job": JOB.model_dump(mode="json") | values}}


FOREIGN = {
    "function": (lambda trap: {"function": "svdq_trap.go"}, "Its function 'svdq_trap.go' is not svdq's"),
    "on_success": (lambda trap: {"on_success": rq.Callback("svdq_trap.go")}, "Its callback 'svdq_trap.go' is not run"),
    "on_failure": (lambda trap: {"on_failure": rq.Callback("svdq_trap.go")}, "Its callback 'svdq_trap.go' is not run"),
    "on_stopped": (lambda trap: {"on_stopped": rq.Callback("svdq_trap.go")}, "Its callback 'svdq_trap.go' is not run"),
    "webhook": (lambda trap: {"webhooks": webhook(trap)}, "Its webhook 'http://127.0.0.1"),
    "extra field": (lambda trap: with_values(run="svdq_trap.go", steps=0), "parameters"),
    "wrong value": (lambda trap: {"kwargs": {"job": JOB.model_dump(mode="json") | {"steps": 0}}}, "parameters"),
    "name that leads out": (lambda trap: with_values(name="../x"), "parameters"),
    "folder that leads out": (lambda trap: with_values(folder="a/../.."), "parameters"),
    "folder elsewhere": (lambda trap: with_values(folder=f"/{trap.marker.parent}"), "parameters"),
    "photo that leads out": (lambda trap: with_values(image="inputs/../../secrets.jpg"), "parameters"),
    "photo behind a photo": (lambda trap: with_values(image=f"{JOB.image}/../../../secrets.jpg"), "parameters"),
    "photo elsewhere": (lambda trap: with_values(image="/etc/passwd"), "parameters"),
    "photo by URL": (lambda trap: with_values(image=trap.url), "parameters"),
    "no parameters": (lambda trap: {"kwargs": {}}, "Its parameters are not those of a job of this version"),
    "pickle": (lambda trap: {"data": zlib.compress(trap.pickle)}, "It is not stored as JSON"),
    "plain pickle": (lambda trap: {"data": trap.pickle}, "It is not stored as JSON"),
    "other JSON": (lambda trap: {"data": b'{"a": 1}'}, "It is not stored as JSON"),
    "empty data": (lambda trap: {"data": b""}, "It is not stored as JSON"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_job_fails_with_a_reason_and_runs_nothing(
    connection: redis.Redis, worker: GroupWorker, trap: Trap, what: str
) -> None:
    make, reason = FOREIGN[what]
    put_raw(connection, **make(trap))
    put(connection, "good")

    active_jobs = take(worker)

    assert [active.rq_job.id for active in active_jobs] == ["good"]
    bad = rq.job.Job.fetch("bad", connection=connection, serializer=rq.serializers.JSONSerializer)
    assert bad.get_status() is JobStatus.FAILED
    result = bad.latest_result()
    assert result is not None
    assert result.exc_string is not None
    assert result.exc_string.startswith("Refused: ")
    assert reason in result.exc_string
    assert "bad" in rq.registry.FailedJobRegistry(queue=active_jobs[0].queue)
    assert set(leases(connection)) == {active_jobs[0].execution.composite_key}
    assert connection.llen(active_jobs[0].queue.intermediate_queue_key) == 0
    worker.maintain()
    trap.check()


def test_a_job_is_refused_whose_id_no_crash_marker_can_name(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a" * (MAX_ID_LENGTH + 1), "b" * MAX_ID_LENGTH)
    assert [active.rq_job.id for active in take(worker)] == ["b" * MAX_ID_LENGTH]
    refused = view(connection, "a" * (MAX_ID_LENGTH + 1))
    assert refused.status == "failed"
    assert f"its id has {MAX_ID_LENGTH + 1} characters" in str(refused.error).lower()


@pytest.mark.parametrize("newer", [{"loop": True}, {"family": "ltx", "sound": True}])
def test_a_job_of_a_newer_version_fails_and_can_be_retried(
    connection: redis.Redis, worker: GroupWorker, newer: dict[str, object]
) -> None:
    put_raw(connection, **with_values(**newer))
    put(connection, "good")
    assert [active.rq_job.id for active in take(worker)] == ["good"]
    failed = view(connection, "bad")
    assert failed.status == "failed"
    assert "if a newer one submitted it, `svdq retry` it" in str(failed.error)
    before = connection.hget("rq:job:bad", "data")
    job_control.retry(connection, "bad")
    assert waiting(connection) == ["bad"]
    assert connection.hget("rq:job:bad", "data") == before


def test_many_refused_jobs_do_not_keep_leases_from_being_renewed(connection: redis.Redis, worker: GroupWorker) -> None:
    queue = SvdqQueue("svdq-default", connection=connection)
    for _ in range(group_worker.LOOKED_AT_ONCE + 1):
        queue.enqueue_call(RENDER, **with_values(loop=True))
    put(connection, "good")
    assert pop(worker) is None
    assert queue.count == 2
    assert [active.rq_job.id for active in take(worker)] == ["good"]


def test_a_refusal_that_is_not_written_loses_no_job(
    settings: Settings, connection: redis.Redis, worker: GroupWorker, trap: Trap
) -> None:
    """RQ goes on when the connection is lost at its first write; the job was queued, and in no queue."""
    make, _ = FOREIGN["no parameters"]
    put_raw(connection, **make(trap))
    cut_off = GroupWorker(lossy(server_url(settings), "failed", written=False))
    with pytest.raises(redis.ConnectionError):
        pop(cut_off)
    recovery.Recovery(cut_off).unknown(set())
    assert waiting(connection) == ["bad"]
    assert pop(worker) is None
    assert status_of(connection, "bad") == "failed"


def test_a_pickled_meta_is_not_loaded(connection: redis.Redis, worker: GroupWorker, trap: Trap) -> None:
    put_raw(connection, meta=trap.pickle, result=trap.pickle)
    active = take(worker)[0]
    worker.finish([(active, {"outputs": []})])
    assert status_of(connection, "bad") == "finished"
    trap.check()


@pytest.mark.parametrize("meta", ["pickle", b"[1]", b'"x"', b"{", b"\xff"])
def test_a_meta_of_another_kind_keeps_no_job_from_going_on(
    connection: redis.Redis, worker: GroupWorker, trap: Trap, meta: str | bytes
) -> None:
    """RQ's tools write pickle where they requeue; such a job fails, is retried, given back and followed by others."""
    queue = SvdqQueue("svdq-default", connection=connection)
    for job_id, after in (("bad", None), ("next", "bad")):
        parameters = {"job": JOB.model_dump(mode="json")}
        queue.enqueue(RENDER, kwargs=parameters, job_id=job_id, depends_on=after)
        connection.hset(f"rq:job:{job_id}", "meta", trap.pickle if meta == "pickle" else meta)
    worker.fail(take(worker)[0], "It broke.")
    assert status_of(connection, "bad") == "failed"
    job_control.retry(connection, "bad")
    worker.return_to_queue(take(worker))
    worker.finish([(take(worker)[0], {"outputs": []})])
    assert take(worker)[0].rq_job.meta == {}
    trap.check()


UNREADABLE = {
    "vanished": lambda connection: connection.delete("rq:job:bad"),
    "not a hash": lambda connection: (connection.delete("rq:job:bad"), connection.set("rq:job:bad", "x")),
    "no data": lambda connection: connection.hdel("rq:job:bad", "data"),
    "unknown status": lambda connection: connection.hset("rq:job:bad", "status", "dancing"),
    "no date": lambda connection: connection.hset("rq:job:bad", "created_at", "yesterday"),
    "no time to live": lambda connection: connection.hset("rq:job:bad", "result_ttl", 10**30),
    "no id": lambda connection: connection.lset("rq:queue:svdq-default", 0, "b a d: \u00e9"),
    "no utf-8": lambda connection: connection.lset("rq:queue:svdq-default", 0, b"\xff"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_unreadable_job_is_dropped(
    connection: redis.Redis, worker: GroupWorker, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    put_raw(connection)
    UNREADABLE[what](connection)
    put(connection, "good")

    following = worker.take(0)[1].next
    assert following is not None
    assert UntrustedJob.find(following.job_id, connection) is None
    active = take(worker)[0]

    assert active.rq_job.id == "good"
    assert "its record cannot be read" in caplog.text
    assert waiting(connection) == []
    assert connection.llen(active.queue.intermediate_queue_key) == 0
    worker.maintain()
    worker.finish([(active, {"outputs": []})])
    assert status_of(connection, "good") == "finished"


@pytest.mark.parametrize("retries", [0, 2])
def test_a_foreign_workers_jobs_are_taken_back_and_nothing_is_called(
    connection: redis.Redis, worker: GroupWorker, trap: Trap, retries: int
) -> None:
    """A worker of someone else's died with jobs that name callbacks: here they are recovered, not obeyed."""
    put_raw(connection, on_failure=rq.Callback("svdq_trap.go"), webhooks=webhook(trap), retries_left=retries)
    put(connection, "good", "broken")
    for job_id in ("bad", "broken", "good"):
        job = fetch(connection, job_id)
        with connection.pipeline() as pipeline:
            rq.executions.Execution.create(job, ttl=15, pipeline=pipeline)
            job.prepare_for_execution("somebody", pipeline)
            pipeline.execute()
    connection.zadd("rq:wip:svdq-default", dict.fromkeys(leases(connection), 1) | {b"\xff:1": 1, "a:b:c": 1})
    connection.delete("rq:queue:svdq-default")
    connection.hset("rq:job:broken", "timeout", "soon")

    taking_back = recovery.Recovery(worker, monotonic=itertools.count(0, 100).__next__)
    for _ in range(2):
        taking_back.expired()
    worker.maintain()

    assert leases(connection) == {}
    assert sorted(waiting(connection)) == ["bad", "broken", "good"]
    assert fetch(connection, "good").retries_left == 3
    assert pop(worker).rq_job.id == "good"
    assert pop(worker) is None
    assert status_of(connection, "bad") == "failed"
    trap.check()


def test_a_registry_that_cannot_be_cleaned_keeps_no_other_from_it(
    connection: redis.Redis, worker: GroupWorker, caplog: pytest.LogCaptureFixture
) -> None:
    connection.set("rq:failed:svdq-high", "not a registry")
    connection.zadd("rq:failed:svdq-default", {"expired": 1})
    worker.maintain()
    assert "The clean-up of svdq-high failed: WRONGTYPE" in caplog.text
    assert not connection.exists("rq:failed:svdq-default")


def test_jobs_with_a_rate_limit_are_refused(connection: redis.Redis, worker: GroupWorker) -> None:
    queue, limit = SvdqQueue("svdq-default", connection=connection), rq.rate_limit.RateLimit("studio", 1)
    for job_id in ("a", "b"):
        queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, rate_limit=limit)
    assert waiting(connection) == ["a"]
    assert pop(worker) is None  # the end of one makes room for the next
    for job_id in ("a", "b"):
        assert "Its rate limit 'studio' is not kept" in str(view(connection, job_id).error)


# RQ's commands.


def heard(worker: GroupWorker) -> list[Command]:
    """What a group hears in a round of its bookkeeping."""
    try:
        return worker.listen()
    except redis.RedisError:
        worker.stop_listening()
        return []


def test_commands_reach_the_group(connection: redis.Redis, worker: GroupWorker, until) -> None:
    put(connection, "a", "b", "c")
    execution = take(worker, 3)[2].execution
    assert worker.listen() == []
    for junk in (b"junk", b"[]", b"{}", b"\xff", b"[" * 100_000):
        connection.publish(worker.pubsub_channel_name, junk)
    rq.command.send_stop_job_command(connection, "b", serializer=JSONSerializer)
    rq.command.send_stop_execution_command(connection, "c", execution.id)
    rq.command.send_shutdown_command(connection, worker.name)
    commands: list[Command] = []
    until(lambda: commands.extend(worker.listen()) or len(commands) >= 3)
    assert commands == [("stop-job", "b", ""), ("stop-execution", "c", execution.id), ("shutdown", "", "")]
    worker.stop_listening()
    until(lambda: connection.pubsub_numsub(worker.pubsub_channel_name)[0][1] == 0)


@pytest.mark.long
def test_commands_reach_the_group_after_redis_was_silent(tmp_path: Path, until) -> None:
    """As behind a pulled cable for some minutes."""
    server = OwnRedis(tmp_path)
    link = redis.Redis.from_url(server.url(), socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
    worker = GroupWorker(link)
    assert worker.listen() == []
    server.stop(signal.SIGKILL)
    with socket.create_server(("127.0.0.1", server.port)) as silent:  # it answers nothing
        until(lambda: heard(worker) or select.select([silent], [], [], 0)[0])
        first, _ = silent.accept()
        until(lambda: heard(worker) or select.select([silent], [], [], 0)[0])
        second, _ = silent.accept()  # made when the first one has timed out
    first.close()
    second.close()
    server.start()
    with server.client(server.url()) as connection:
        until(lambda: rq.command.send_shutdown_command(connection, worker.name) or heard(worker))
    worker.stop_listening()
    link.close()
    server.stop()


@pytest.mark.slow
def test_commands_reach_the_group_after_redis_was_busy(tmp_path: Path, until) -> None:
    """A connection whose subscription was refused, with an answer such as BUSY, never gets a command."""
    server = OwnRedis(tmp_path)
    with server.client(server.url()) as connection, server.client(server.url()) as script:
        connection.config_set("lua-time-limit", 20)
        worker = GroupWorker(redis.Redis.from_url(server.url()))
        until(lambda: heard(worker) or connection.pubsub_numsub(worker.pubsub_channel_name)[0][1] == 1)
        connection.client_kill_filter(_type="pubsub")
        with ThreadPoolExecutor(1) as threads:
            busy = threads.submit(script.eval, "while true do end", 0)
            until(lambda: is_busy(connection))
            assert heard(worker) == []  # it subscribes again, and is refused
            connection.script_kill()
            assert isinstance(busy.exception(), redis.ResponseError)
        until(lambda: rq.command.send_shutdown_command(connection, worker.name) or heard(worker))
        worker.stop_listening()
    server.stop()


def is_busy(connection: redis.Redis) -> bool:
    try:
        return not connection.ping()
    except redis.ResponseError:
        return True
