"""Records in Redis that are not of the expected shape: each is reported on a line of its own, and the rest goes on."""

import base64
import json
import time
from collections.abc import Callable

import pytest
import redis
from rq.job import JobStatus

from svdq.producer import keys
from svdq.producer.status.ranks import IntakeStatus
from tests.conftest import Cli
from tests.queued import JOB, add, enqueue, fail, finish, start
from tests.ranks import rank, save

DEEP = b"[" * 200_000 + b"]" * 200_000
BAD = "b" * 20


def spoil_hash(**fields: object) -> Callable[[redis.Redis], None]:
    def spoil(connection: redis.Redis) -> None:
        for name, value in fields.items():
            if value is None:
                connection.hdel(f"rq:job:{BAD}", name)
            else:
                connection.hset(f"rq:job:{BAD}", name, value)

    return spoil


def make_a_string(connection: redis.Redis) -> None:
    connection.delete(f"rq:job:{BAD}")
    connection.set(f"rq:job:{BAD}", "x")


def spoil_result(connection: redis.Redis) -> None:
    connection.delete(f"rq:results:{BAD}")
    connection.xadd(f"rq:results:{BAD}", {"type": "1", "return_value": base64.b64encode(DEEP)})


#: What is wrong with a job that has just failed, and whether nothing of it can be shown.
UNREADABLE = {
    "no data": spoil_hash(data=None),
    "a string": make_a_string,
    "no time": spoil_hash(ended_at="yesterday"),
    "another status": spoil_hash(status="dreaming"),
    "not UTF-8": spoil_hash(origin=b"\xff\xfe"),
    "a deep result": spoil_result,
    "a time that is too late": spoil_hash(ended_at="9999-12-31T23:59:59.000000Z"),
    "a number that is too large": spoil_hash(result_ttl=10**30),
    "intervals that are none": spoil_hash(retry_intervals='["x"]'),
    "dependencies that are none": spoil_hash(dependency_ids="7"),
    "a step that is none": spoil_hash(meta=json.dumps({"step": "x"})),
}
READABLE = {
    "used with a wrong type": spoil_hash(meta=json.dumps({"used": {"frames": "many"}})),
    "data is not JSON": spoil_hash(data=b"\x80\x04pickle"),
}


@pytest.mark.parametrize("name", [*UNREADABLE, *READABLE])
def test_one_bad_record_breaks_no_command(svdq: Cli, connection: redis.Redis, name: str) -> None:
    good, queued = add(connection, 1), add(connection, 2)
    finish(good)
    fail(enqueue(connection, JOB.model_copy(update={"name": "bad"}), BAD))
    (UNREADABLE | READABLE)[name](connection)

    listed = svdq("list")
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert lines.keys() == {good.id, queued.id, BAD}
    assert ("cannot be read: " in lines[BAD]) == (name in UNREADABLE)
    assert len(lines[BAD]) < 500
    by_id = {view["id"]: view for view in map(json.loads, svdq("list", "--json").stdout.splitlines())}
    assert by_id[good.id]["status"] == "finished"
    assert by_id[BAD]["error"]
    for command in (["status"], ["status", "--json"], ["top"], ["list", "--status", "failed"]):
        done = svdq(*command)
        assert (done.returncode, done.stderr) == (0, ""), command
    done = svdq("status", good.id, BAD, queued.id)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3)
    done = svdq("wait", good.id, BAD)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2), done.stderr
    done = svdq("report", "--since", "1h", "--json")
    assert done.returncode == 0, done.stderr
    reported = {job["id"] for job in json.loads(done.stdout)["jobs"]}
    assert good.id in reported
    assert BAD in reported or BAD in done.stderr
    done = svdq("prune", "--older-than", "30d", "--yes")
    assert done.returncode == 0, done.stderr
    if name in UNREADABLE:
        # Queued again it may be as good as new; else the reason is one sentence.
        done = svdq("retry", BAD)
        assert (done.returncode, done.stderr.count("\n")) in ((0, 0), (2, 1))


def test_one_bad_result_breaks_no_command(svdq: Cli, connection: redis.Redis) -> None:
    good, bad = add(connection, 1), add(connection, 2)
    finish(good)
    finish(bad, {"outputs": [1]})
    for command in (["list"], ["status", good.id, bad.id], ["top"]):
        done = svdq(*command)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert command == ["top"] or ("cannot be read: " in done.stdout and good.id in done.stdout)


def test_bad_records_in_flight_of_workers_and_of_ranks(svdq: Cli, connection: redis.Redis) -> None:
    good, bad = add(connection, 1), add(connection, 2)
    for job in (good, bad):
        start(job)
    connection.hset(bad.key, "created_at", "x")
    connection.zadd("rq:wip:svdq-default", {b"\xff:x": time.time() + 60})
    connection.sadd(
        "rq:workers", "rq:worker:list", b"rq:worker:\xff", "rq:worker:gone", "rq:worker:odd", "rq:worker:even"
    )
    connection.rpush("rq:worker:list", "x")
    connection.hset("rq:worker:odd", mapping={"queues": "svdq-default", "pid": "x"})
    connection.hset("rq:worker:even", mapping={"queues": "else,svdq-default", "pid": "7"})
    connection.hset(keys.PAUSES, mapping={b"\xff": b"\xfe"})
    connection.hset(b"rq:worker:\xff", "birth", "x")
    save(connection, rank(0, intake=IntakeStatus(worker="w", in_flight=(good.id, bad.id))))
    save(connection, rank(1))
    for number, text in enumerate(
        (DEEP, b"\xff", b"[]", b'{"rank":0}', rank(0, "x").model_dump_json().replace("2.0", "1e300").encode())
    ):
        connection.zadd(keys.RANKS, {f"odd-{number}": 1.0})
        connection.set(f"{keys.RANK}odd-{number}", text)
    connection.zadd(keys.RANKS, {b"\xff": 1.0, "a hash": 1.0})
    connection.hset(f"{keys.RANK}a hash", "a", "b")
    done = svdq("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert good.id in done.stdout
    assert "even" in done.stdout
    done = svdq("status", "--json")
    document = json.loads(done.stdout)
    assert [(entry["name"], entry["pid"]) for entry in document["workers"]] == [("even", 7)]
    assert [entry["rank"] for entry in document["ranks"]] == [0, 1]
    assert svdq("top").returncode == 0
    assert svdq("status", bad.id).stdout.startswith(f"{bad.id}  ?  started")


def test_stopped_jobs_are_neither_failed_nor_canceled(svdq: Cli, connection: redis.Redis) -> None:
    failed, stopped, canceled = (add(connection, number) for number in (1, 2, 3))
    fail(failed)
    fail(stopped, status=JobStatus.STOPPED)
    connection.zadd(keys.STOPPED, {stopped.id: 1e12, failed.id: 1e12})
    assert svdq("cancel", canceled.id).returncode == 0
    (counts,) = [
        queue for queue in json.loads(svdq("status", "--json").stdout)["queues"] if queue["name"] == "svdq-default"
    ]
    assert (counts["failed"], counts["stopped"], counts["canceled"]) == (1, 1, 1)
    for status, job in (("failed", failed), ("stopped", stopped), ("canceled", canceled)):
        assert [line.split()[0] for line in svdq("list", "--status", status).stdout.splitlines()] == [job.id]
    both = svdq("list", "--status", "failed", "--status", "stopped").stdout
    assert {line.split()[0] for line in both.splitlines()} == {failed.id, stopped.id}
    assert "stopped" in svdq("status", stopped.id).stdout
