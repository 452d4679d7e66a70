"""RQ's `depends_on` with jobs of ours: what waits for a job is queued when that ends, however it ends."""

import subprocess
import sys

import pytest
import redis
from rq.job import Dependency, JobStatus

from svdq.producer import job_control
from svdq.producer.connection import server_url
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import counts
from svdq.worker.queue import scripts
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from tests.worker.jobs import JOB, HookedRedis, lossy, pop


def put(connection: redis.Redis, job_id: str, depends_on: object = None, priority: str = "default") -> None:
    """Enqueue as any user of RQ does."""
    queue = SvdqQueue(f"svdq-{priority}", connection=connection)
    queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, depends_on=depends_on)


def put_family(connection: redis.Redis) -> None:
    """A parent, a child of the usual kind, and one that comes also after a failure, in another queue."""
    put(connection, "parent")
    put(connection, "child", "parent")
    put(connection, "heir", Dependency("parent", allow_failure=True), "low")


def statuses(connection: redis.Redis) -> dict[str, str]:
    return {job_id: fetch(connection, job_id).get_status().value for job_id in ("parent", "child", "heir")}


def rest(worker: GroupWorker) -> list[str]:
    """Take all jobs off the queues, and return them."""
    taken = []
    while (active := pop(worker)) is not None:
        taken.append(active.rq_job.id)
    return taken


def test_success_queues_both(connection: redis.Redis, worker: GroupWorker) -> None:
    put_family(connection)
    active = pop(worker)
    assert pop(worker) is None
    assert statuses(connection) == {"parent": "started", "child": "deferred", "heir": "deferred"}
    worker.finish([(active, {"outputs": []})])
    assert statuses(connection) == {"parent": "finished", "child": "queued", "heir": "queued"}
    assert connection.zcard("rq:deferred:svdq-default") == connection.zcard("rq:deferred:svdq-low") == 0
    assert rest(worker) == ["child", "heir"]


def test_failure_queues_what_allows_it(connection: redis.Redis, worker: GroupWorker) -> None:
    put_family(connection)
    worker.fail(pop(worker), "It broke.")
    assert statuses(connection) == {"parent": "failed", "child": "deferred", "heir": "queued"}
    # The other one comes when the parent is retried and finishes.
    job_control.retry(connection, "parent")
    worker.finish([(pop(worker), {"outputs": []})])
    assert rest(worker) == ["child", "heir"]


def test_a_canceled_or_stopped_parent_queues_nothing_until_it_is_retried(
    connection: redis.Redis, worker: GroupWorker
) -> None:
    put_family(connection)
    assert job_control.cancel(connection, "parent") == "canceled"
    assert pop(worker) is None
    job_control.retry(connection, "parent")
    worker.stop(pop(worker))
    assert statuses(connection) == {"parent": "stopped", "child": "deferred", "heir": "deferred"}
    assert (counts(connection)["svdq-default"]["stopped"], counts(connection)["svdq-default"]["failed"]) == (1, 0)
    assert pop(worker) is None
    job_control.retry(connection, "parent")
    assert counts(connection)["svdq-default"]["stopped"] == 0
    worker.finish([(pop(worker), {"outputs": []})])
    assert rest(worker) == ["child", "heir"]


def test_a_canceled_child_is_not_queued(connection: redis.Redis, worker: GroupWorker) -> None:
    put_family(connection)
    job_control.cancel(connection, "child")
    worker.finish([(pop(worker), {"outputs": []})])
    assert statuses(connection)["child"] == "canceled"
    assert rest(worker) == ["heir"]


def test_a_child_waits_for_all_its_parents(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "parent")
    put(connection, "other")
    put(connection, "child", ["parent", "other"])
    first, second = pop(worker), pop(worker)
    worker.finish([(second, {"outputs": []})])
    assert pop(worker) is None
    worker.finish([(first, {"outputs": []})])
    assert rest(worker) == ["child"]


def test_a_child_that_a_user_queued_is_not_queued_by_its_parent(connection: redis.Redis, worker: GroupWorker) -> None:
    put_family(connection)
    job_control.cancel(connection, "child")
    job_control.retry(connection, "child")
    parent, child = pop(worker), pop(worker)
    worker.finish([(child, {"outputs": []})])
    worker.finish([(parent, {"outputs": []})])
    assert statuses(connection) == {"parent": "finished", "child": "finished", "heir": "queued"}
    assert rest(worker) == ["heir"]


def test_a_child_that_has_ended_is_not_queued_by_a_parent_that_was_retried(
    connection: redis.Redis, worker: GroupWorker
) -> None:
    put(connection, "parent")
    put(connection, "other")
    put(connection, "child", Dependency(["parent", "other"], allow_failure=True))
    worker.fail(pop(worker), "It broke.")
    for _ in ("other", "child"):
        worker.finish([(pop(worker), {"outputs": []})])
    assert pop(worker) is None
    job_control.retry(connection, "parent")
    worker.finish([(pop(worker), {"outputs": []})])
    assert fetch(connection, "child").get_status().value == "finished"
    assert pop(worker) is None


# Crashes.


def test_a_parent_of_a_dead_group_queues_them_in_the_end(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker
) -> None:
    put_family(connection)
    assert pop(dead).rq_job.id == "parent"
    Recovery(worker).at_start([])
    active = pop(worker)
    assert active.rq_job.id == "parent"
    assert pop(worker) is None
    worker.finish([(active, {"outputs": []})])
    assert rest(worker) == ["child", "heir"]


def test_a_kill_between_end_and_dependents_of_a_version_before_rq_3_is_made_good(
    connection: redis.Redis, worker: GroupWorker
) -> None:
    put_family(connection)
    worker.fail(pop(worker), "It broke.")
    connection.lrem("rq:queue:svdq-low", 1, "heir")
    connection.hset("rq:job:heir", "status", "deferred")
    connection.zadd("rq:deferred:svdq-low", {"heir": 1})
    connection.sadd("rq:job:parent:dependents", "heir")

    Recovery(worker).at_start([])

    assert statuses(connection) == {"parent": "failed", "child": "deferred", "heir": "queued"}
    assert rest(worker) == ["heir"]


READY = "ready_to_enqueue"  # RQ's status of a job whose dependencies are met and that is not queued yet


def dying(settings: Settings) -> GroupWorker:
    """Make a group that loses Redis when that has written an end, and before it queues the dependents."""
    return GroupWorker(lossy(server_url(settings), READY))


def end_and_die(settings: Settings, connection: redis.Redis) -> None:
    """Queue a family, and end the parent by a group that is `dying`."""
    put_family(connection)
    dead = dying(settings)
    with pytest.raises(redis.ConnectionError):
        dead.finish([(pop(dead), {"outputs": []})])


def test_a_group_that_dies_after_an_end_leaves_nothing_deferred(
    settings: Settings, connection: redis.Redis, worker: GroupWorker
) -> None:
    end_and_die(settings, connection)
    assert statuses(connection) == {"parent": "finished", "child": READY, "heir": READY}
    assert counts(connection)["svdq-default"]["deferred"] == counts(connection)["svdq-low"]["deferred"] == 1
    assert {view(connection, job_id).status for job_id in ("child", "heir")} == {"deferred"}
    worker.maintain()
    assert statuses(connection) == {"parent": "finished", "child": "queued", "heir": "queued"}
    assert rest(worker) == ["child", "heir"]


def test_a_job_that_is_about_to_be_queued_can_be_canceled(
    settings: Settings, connection: redis.Redis, worker: GroupWorker
) -> None:
    end_and_die(settings, connection)
    assert job_control.cancel(connection, "child") == "canceled"
    worker.maintain()
    assert statuses(connection) == {"parent": "finished", "child": "canceled", "heir": "queued"}
    assert rest(worker) == ["heir"]


def test_a_dependent_that_is_canceled_during_the_end_stays_canceled(
    settings: Settings, connection: redis.Redis, worker: GroupWorker
) -> None:
    put_family(connection)
    redis_of_worker = HookedRedis.from_url(server_url(settings))
    ending = GroupWorker(redis_of_worker)
    parent = pop(ending)
    canceled = []

    def cancel_once(commands: str) -> None:
        if READY in commands and not canceled:
            canceled.append(job_control.cancel(connection, "child"))

    redis_of_worker.before = cancel_once
    ending.finish([(parent, {"outputs": []})])
    assert canceled == ["canceled"]
    assert statuses(connection) == {"parent": "finished", "child": "canceled", "heir": "queued"}


@pytest.mark.parametrize(("end", "child"), [("finished", READY), ("failed", "deferred")])
def test_an_end_that_redis_has_written_and_not_confirmed_queues_both(
    settings: Settings, connection: redis.Redis, end: str, child: str
) -> None:
    put_family(connection)
    worker = dying(settings)
    parent = pop(worker)
    with pytest.raises(redis.ConnectionError):
        worker.finish([(parent, {"outputs": []})]) if end == "finished" else worker.fail(parent, "It broke.")
    assert statuses(connection) == {"parent": end, "child": child, "heir": READY}
    assert worker.confirm_end(parent) is JobStatus(end)
    worker.maintain()
    assert rest(worker) == ["child", "heir"] if end == "finished" else ["heir"]


def test_a_refusal_of_a_job_that_was_taken_back_queues_none(connection: redis.Redis, worker: GroupWorker) -> None:
    """A group may sleep past its lease after a pop."""
    put_family(connection)
    [popped] = scripts.pop(connection, worker.queues, worker.name).jobs
    scripts.return_popped_to_queue(connection, popped.queue, b"parent", worker.name.encode())
    worker.fail_popped(fetch(connection, "parent"), popped.queue, "Refused.")
    assert statuses(connection) == {"parent": "queued", "child": "deferred", "heir": "deferred"}


def test_a_result_that_is_not_to_be_kept_queues_both(connection: redis.Redis, worker: GroupWorker) -> None:
    put_family(connection)
    connection.hset("rq:job:parent", "result_ttl", 0)
    worker.finish([(pop(worker), {"outputs": []})])
    assert rest(worker) == ["child", "heir"]


# Dependents that anyone may have written.

UNREADABLE = {
    "vanished": lambda connection: connection.delete("rq:job:child"),
    "no data": lambda connection: connection.hdel("rq:job:child", "data"),
    "not a hash": lambda connection: (connection.delete("rq:job:child"), connection.set("rq:job:child", "x")),
    "no id": lambda connection: connection.sadd("rq:job:parent:dependents", "b a d"),
    "no dependency": lambda connection: connection.sadd("rq:job::child:dependencies", b"\xff", "nobody"),
    "no dependencies": lambda connection: (
        connection.delete("rq:job::child:dependencies"),
        connection.set("rq:job::child:dependencies", "x"),
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("ends", ["succeed", "fail"])
def test_an_unreadable_dependent_keeps_no_job_from_ending(
    connection: redis.Redis, worker: GroupWorker, what: str, ends: str
) -> None:
    put_family(connection)
    UNREADABLE[what](connection)
    Recovery(worker).at_start([])
    active = pop(worker)
    if ends == "succeed":
        worker.finish([(active, {"outputs": []})])
    else:
        worker.fail(active, "It broke.")
    assert fetch(connection, "parent").get_status().value == ("finished" if ends == "succeed" else "failed")
    assert connection.zcard("rq:wip:svdq-default") == 0
    assert "heir" in rest(worker)


def test_a_job_of_the_users_own_queue_follows_a_video(
    settings: Settings, connection: redis.Redis, worker: GroupWorker
) -> None:
    """The job that docs/rq.md recommends in place of callbacks, run by RQ's own worker."""
    put(connection, "video")
    put(connection, "broken")
    studio = SvdqQueue("studio", connection=connection)
    for job_id in ("video", "broken"):
        after = Dependency(job_id, allow_failure=True)
        studio.enqueue("os.path.basename", f"videos/{job_id}", job_id=f"after-{job_id}", depends_on=after)
    worker.finish([(pop(worker), {"outputs": []})])
    assert studio.get_job_ids() == ["after-video"]
    worker.fail(pop(worker), "It broke.")
    assert studio.get_job_ids() == ["after-video", "after-broken"]
    assert pop(worker) is None  # it is not ours to run

    command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--serializer", "rq.serializers.JSONSerializer"]
    done = subprocess.run([*command, "--url", server_url(settings), "studio"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [fetch(connection, f"after-{name}").return_value() for name in ("video", "broken")] == ["video", "broken"]
