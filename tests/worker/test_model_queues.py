"""Workers with different models of one family: each takes the jobs that name its model, and those that name none."""

import pytest
import redis

from svdq.producer.status.job_view import view
from svdq.worker.ability import Ability
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from tests.queued import SvdJob, enqueue
from tests.worker.jobs import pop

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)


def test_a_group_takes_the_jobs_for_its_model_first_and_none_for_others(connection: redis.Redis) -> None:
    for job_id, model, priority in (
        ("any", None, "default"),
        ("own", "mine", "default"),
        ("urgent", None, "high"),
        ("other", "yours", "high"),
    ):
        enqueue(connection, JOB.model_copy(update={"model": model}), job_id, priority)
    mine, yours = (GroupWorker(connection, ability=Ability(model=model)) for model in ("mine", "yours"))
    mine.start()
    yours.start()
    assert mine.take(0)[1].num_queued == 2  # its own, and half of two
    taken = [pop(mine) for _ in range(4)]
    assert [each and each.rq_job.id for each in taken] == ["urgent", "own", "any", None]
    assert yours.take(0)[1].num_queued == 1
    active = pop(yours)
    assert active is not None
    assert active.rq_job.id == "other"
    yours.finish([(active, {})])
    assert view(connection, "other").status == "finished"
    mine.end()
    yours.end()


def test_a_group_of_another_model_returns_the_jobs_of_a_dead_one(connection: redis.Redis) -> None:
    enqueue(connection, JOB.model_copy(update={"model": "yours"}), "own")
    mine, yours = (GroupWorker(connection, ability=Ability(model=model)) for model in ("mine", "yours"))
    mine.start()
    yours.start()
    active = pop(yours)
    assert active is not None
    connection.zadd(active.queue.started_job_registry.key, {active.execution.composite_key: 1})  # the lease has ended
    yours.end()
    now_s = 0.0
    recovery = Recovery(mine, lambda: now_s)
    recovery.expired()
    assert view(connection, "own").status == "started"  # it may be renewed
    now_s = 60.0
    recovery.expired()
    assert connection.lrange("rq:queue:svdq-default:yours", 0, -1) == [b"own"]
    mine.end()


@pytest.mark.slow
@pytest.mark.long
def test_each_worker_makes_the_videos_that_name_its_model(site) -> None:
    own = [site.submit(model="preview") for _ in range(3)]
    other = [site.submit(model="simulated:step_ms=1") for _ in range(3)]
    any_one = site.submit()
    group = site.start(1, "--burst", wait=False)
    assert group.end() == 0, group.text
    assert site.states([*own, any_one]) == ["finished"] * 4
    assert site.states(other) == ["queued"] * 3
    group = site.start(1, "--burst", model="simulated:step_ms=1", wait=False)
    assert group.end() == 0, group.text
    assert site.states(other) == ["finished"] * 3
    assert {site.view(job_id).model for job_id in own} == {"preview"}
