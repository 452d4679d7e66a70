"""How often the bookkeeping of a group waits for an answer of Redis, which may be far away."""

from svdq.worker.outages import connect
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from tests.proxy import Proxy
from tests.worker.jobs import put


def test_jobs_are_taken_and_finished_in_few_round_trips(settings, connection, worker: GroupWorker) -> None:
    job_ids = [f"job{number}" for number in range(5)]
    put(connection, *job_ids)
    with Proxy(settings.redis_url, delay_s=0.2) as proxy:
        worker.connection = connect(proxy.url)
        worker.queues = [type(queue)(queue.name, connection=worker.connection) for queue in worker.queues]
        worker.take(0)  # connects
        before = proxy.num_round_trips
        taken, _ = worker.take(5)
        assert [active.rq_job.id for active in taken] == job_ids
        assert proxy.num_round_trips - before <= 2
        assert all(worker.finish([(active, {"outputs": ["a.gif"]}) for active in taken]))
        assert proxy.num_round_trips - before <= 3
        worker.connection.close()
        worker.connection = connection
        proxy.shutdown()
    assert connection.zcard("rq:finished:svdq-default") == 5


def test_the_maintenance_asks_as_little_with_many_queues(settings, connection, worker: GroupWorker) -> None:
    for number in range(5):
        connection.sadd("rq:queues", f"rq:queue:svdq-default:model{number}")
    with Proxy(settings.redis_url, delay_s=0.2) as proxy:
        far = GroupWorker(connect(proxy.url))
        recovery = Recovery(far)
        far.take(0)  # connects
        before = proxy.num_round_trips
        seen = recovery.look()
        recovery.unknown([], seen)
        recovery.expired(seen)
        far.promote_due()
        far.maintain()
        assert proxy.num_round_trips - before <= 3 + 1 + 4
        far.connection.close()
        proxy.shutdown()
