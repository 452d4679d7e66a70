"""What svdq writes by RQ's private names is what RQ's own worker writes; docs/rq.md lists these names."""

import pytest
import redis
import rq
import rq.job
from rq.serializers import JSONSerializer

from svdq.producer import job_control
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.worker.queue.group_worker import GroupWorker
from tests.worker.jobs import JOB, pop


def put(connection: redis.Redis, name: str, function: str, **parameters: object) -> rq.Queue:
    queue = SvdqQueue(name, connection=connection)
    queue.enqueue(function, kwargs=parameters, job_id="parent", result_ttl=1000, failure_ttl=2000)
    after = rq.job.Dependency("parent", allow_failure=True)
    queue.enqueue(function, kwargs=parameters, job_id="child", depends_on=after)
    return queue


def written(connection: redis.Redis, queue: rq.Queue) -> dict[bytes, object]:
    """Describe all of RQ's keys: their types, fields, members and whether they expire."""
    found: dict[bytes, object] = {}
    for key in connection.scan_iter(b"rq:*"):
        if key.startswith((b"rq:worker", b"rq:clean_")):
            continue  # of workers, whose names differ
        kind, members = connection.type(key), None
        if kind == b"hash":
            members = {*connection.hkeys(key)}
        elif kind == b"stream":
            members = [sorted(fields) for _, fields in connection.xrange(key)]
        elif kind == b"zset":
            members = connection.zrange(key, 0, -1)
        elif kind == b"list":
            members = connection.lrange(key, 0, -1)
        ttl_s = connection.ttl(key)
        found[key.replace(queue.name.encode(), b"<queue>")] = (kind, members, round(ttl_s, -2))
    return found


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_an_end_leaves_what_rqs_own_worker_leaves(connection: redis.Redis, worker: GroupWorker, end: str) -> None:
    function = "builtins.dict" if end == "finished" else "builtins.no_such_function"
    studio = put(connection, "studio", function, job=1)
    rq.SimpleWorker([studio], connection=connection, serializer=JSONSerializer).work(burst=True, max_jobs=1)
    expected = written(connection, studio)
    assert fetch(connection, "parent").get_status().value == end
    assert studio.get_job_ids() == ["child"]

    connection.flushdb()
    ours = put(connection, "svdq-default", RENDER, job=JOB.model_dump(mode="json"))
    worker.register_birth()
    active = pop(worker)
    worker.finish([(active, {"outputs": []})]) if end == "finished" else worker.fail(active, "It broke.")
    assert written(connection, ours) == expected


def test_a_retried_job_is_as_rq_requeues_it(connection: redis.Redis, worker: GroupWorker) -> None:
    queue = put(connection, "svdq-default", RENDER, job=JOB.model_dump(mode="json"))

    def fail_and(requeue: object) -> dict[bytes, object]:
        worker.fail(pop(worker), "It broke.")
        queue.remove("child")
        requeue()
        assert fetch(connection, "parent").get_status().value == "queued"
        return {key: value for key, value in written(connection, queue).items() if b"parent" in key or b"<" in key}

    assert fail_and(lambda: job_control.retry(connection, "parent")).keys() == (
        fail_and(lambda: fetch(connection, "parent").requeue()).keys()
    )


def test_the_callbacks_of_a_job_are_seen_without_importing_them(connection: redis.Redis) -> None:
    queue = SvdqQueue("svdq-default", connection=connection)
    named = {name: rq.Callback(f"no.such.{name}") for name in ("on_success", "on_failure", "on_stopped")}
    queue.enqueue(RENDER, job_id="a", **named)
    job = fetch(connection, "a")
    found = (job._success_callback_name, job._failure_callback_name, job._stopped_callback_name)
    assert found == tuple(f"no.such.{name}" for name in named)
    assert job.failure_callback is None
