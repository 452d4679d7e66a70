"""How often the bookkeeping of a group waits for an answer of Redis, which may be far away."""


from svdq.worker.outages import connect
from svdq.worker.queue.group_worker import GroupWorker
from tests.proxy import Proxy
from tests.worker.jobs import put


def test_jobs_are_taken_and_finished_in_few_round_trips(settings, connection, worker: GroupWorker) -> None:
    job_ids = [f"job{number}" for number in range(5)]
    put(connection, *job_ids)
    with Proxy(settings.redis_url) as proxy:
        worker.connection = connect(proxy.url)
        worker.queues = [type(queue)(queue.name, connection=worker.connection) for queue in worker.queues]
        worker.take(0)  # connects
        before = proxy.num_round_trips
        taken = worker.take(5)
        assert [active.rq_job.id for active in taken.jobs] == job_ids
        assert proxy.num_round_trips - before <= 2
        assert all(worker.finish([(active, {"outputs": ["a.gif"]}) for active in taken.jobs]))
        assert proxy.num_round_trips - before <= 3
        worker.connection.close()
        worker.connection = connection
        proxy.shutdown()
    assert connection.zcard("rq:finished:svdq-default") == 5
