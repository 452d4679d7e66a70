"""A Redis that svdq on RQ 2.12 has filled is taken over without loss.

The files in `filled/` are named by the commit whose processes wrote the jobs. Its group was killed with two jobs in
flight, and between the end of a job and the queueing of the job that depends on it.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from svdq.producer import job_control
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import counts, newest_ids
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import SILENT_S, Recovery
from tests.worker.jobs import Clock, pop

FILLED = sorted(Path(__file__).with_name("filled").glob("*.json"))


def restore(connection: redis.Redis, path: Path) -> dict[str, str]:
    """Write the keys of a file, with times as if it were of now; return the ids of its jobs by what each has met."""
    content = json.loads(path.read_text())
    later_s = time.time() - content["dumped_at"]

    def raw(text: str) -> bytes:
        return text.encode("latin-1")

    for key, entry in content["keys"].items():
        value: Any = entry["value"]
        match entry["type"]:
            case "string":
                connection.set(raw(key), raw(value))
            case "hash":
                connection.hset(raw(key), mapping={raw(name): raw(text) for name, text in value.items()})
            case "list":
                connection.rpush(raw(key), *map(raw, value))
            case "set":
                connection.sadd(raw(key), *map(raw, value))
            case "zset":
                connection.zadd(raw(key), {raw(member): score + later_s * (score > 1e9) for member, score in value})
            case "stream":
                for number, fields in value:
                    connection.xadd(raw(key), {raw(name): raw(text) for name, text in fields.items()}, id=number)
    return {what: job_id for what, (job_id, _) in content["jobs"].items()}


def finish_all(worker: GroupWorker) -> list[str]:
    """Finish all jobs that can be taken, and return their ids in order."""
    done = []
    while (active := pop(worker)) is not None:
        assert worker.finish([(active, {"outputs": ["a.gif"]})]) == [True]
        done.append(active.id)
    return done


@pytest.mark.parametrize("path", FILLED, ids=lambda path: path.stem)
def test_what_an_earlier_version_has_left_is_rendered(connection: redis.Redis, worker: GroupWorker, path: Path) -> None:
    jobs = restore(connection, path)
    statuses = {what: view(connection, job_id).status for what, job_id in jobs.items()}
    assert statuses == {
        **{what: what for what in ("finished", "failed", "stopped", "canceled", "scheduled", "deferred", "queued")},
        "started": "started",
        "link1": "finished",
        "link2": "started",
        "link3": "deferred",
        "parent": "failed",
        "orphan": "deferred",
    }
    assert {*newest_ids(connection)} == {*jobs.values()}

    clock = Clock()
    recovery = Recovery(worker, monotonic=clock)
    recovery.at_start([])
    assert view(connection, jobs["orphan"]).status == "queued"
    for wip in ("rq:wip:svdq-high", "rq:wip:svdq-default"):
        connection.zunionstore(wip, {wip: 0})  # the leases end
    for _ in range(2):
        recovery.expired()
        clock.now += SILENT_S
    worker.maintain()

    done = finish_all(worker)
    assert done[:2] == [jobs["started"], jobs["link2"]]
    assert {*done[2:]} == {jobs[what] for what in ("orphan", "queued", "link3", "deferred")}
    job_control.queue_now(connection, jobs["scheduled"])
    ended = [jobs[what] for what in ("failed", "stopped", "canceled", "parent")]
    connection.hdel(f"rq:job:{jobs['failed']}", "success_callback_name")
    assert all(answer == "queued" for _, answer in job_control.retry_many(connection, ended))
    assert {*finish_all(worker)} == {jobs["scheduled"], *ended}
    assert {view(connection, job_id).status for job_id in jobs.values()} == {"finished"}
    assert sum(sum(of_queue.values()) for of_queue in counts(connection).values()) == len(jobs)
