import pytest
import redis
import rq
from rq.serializers import JSONSerializer

from svdq.pipeline.errors import InputError, SvdqError
from svdq.producer.queue import RENDER, SvdqQueue, fetch, read_job, render, statuses
from tests.queued import JOB, enqueue

ID = "0" * 20


def test_enqueues_json_once(connection: redis.Redis) -> None:
    enqueue(connection, JOB, ID, "high")
    again = enqueue(connection, JOB.model_copy(update={"seed": 2}), ID, "low")
    assert read_job(again) == JOB
    assert again.origin == "svdq-high"
    assert again.func_name == RENDER
    assert again.timeout == -1
    assert again.retries_left == 3
    assert again.meta == {}
    assert SvdqQueue("svdq-high", connection=connection).get_job_ids() == [ID]
    assert SvdqQueue("svdq-low", connection=connection).count == 0
    assert fetch(connection, ID).id == ID
    assert statuses(connection, ["f" * 20, ID]) == [None, "queued"]


@pytest.mark.parametrize("job_id", ["f" * 20, "no id at all", ""])
def test_unknown_id(connection: redis.Redis, job_id: str) -> None:
    with pytest.raises(InputError, match="no job"):
        fetch(connection, job_id)


def test_a_stock_worker_runs_nothing_of_ours(connection: redis.Redis) -> None:
    enqueue(connection, JOB, ID)
    ours = SvdqQueue("svdq-default", connection=connection)
    rq.SimpleWorker([ours], connection=connection, serializer=JSONSerializer).work(burst=True)
    result = fetch(connection, ID).latest_result()
    assert result is not None
    assert "svdq worker" in str(result.exc_string)
    with pytest.raises(SvdqError, match="svdq worker"):
        render()


def test_jobs_of_other_programs_are_not_read(connection: redis.Redis) -> None:
    ours = SvdqQueue("svdq-default", connection=connection)
    assert read_job(ours.enqueue("os.system", "true")) is None
    assert read_job(ours.enqueue(RENDER, job={"image": "/etc/passwd"})) is None
    pickled = rq.Queue("svdq-default", connection=connection).enqueue("os.system", "true", job_id="pickled")
    assert read_job(fetch(connection, pickled.id)) is None
