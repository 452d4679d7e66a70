"""How often the commands that look at all jobs wait for an answer of Redis, which may be far away."""

import pytest

from svdq.producer.status.ranks import IntakeStatus
from svdq.worker.queue.group_worker import GroupWorker
from tests.proxy import Proxy
from tests.ranks import rank, save
from tests.worker.jobs import put


@pytest.mark.parametrize(("command", "number"), [("status", 4), ("list", 5)])
def test_a_command_asks_redis_few_times(settings, connection, svdq, monkeypatch, command: str, number: int) -> None:
    """At 300 ms, four are 1.2 s; one more where a job has ended or waits outside of the queues."""
    put(connection, "a", "b", "c")
    worker = GroupWorker(connection)
    worker.start()
    assert [active.rq_job.id for active in worker.take()[0]] == ["a"]
    save(connection, rank(0, intake=IntakeStatus(worker=worker.name, in_flight=("a",))), rank(1))
    try:
        with Proxy(settings.redis_url, delay_s=0.2) as proxy:
            monkeypatch.setenv("SVDQ_REDIS_URL", proxy.url)
            assert svdq(command).returncode == 0
            assert proxy.num_round_trips <= number
            proxy.shutdown()
    finally:
        worker.end()
