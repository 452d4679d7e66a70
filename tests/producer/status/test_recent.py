"""What a reader that looks each second reads again."""

from typing import Any

import redis

from svdq.producer.status.estimates import Parameters
from svdq.producer.status.snapshot import Recent, take
from tests.queued import SvdJob, enqueue


def test_queued_jobs_are_read_once(connection: redis.Redis) -> None:
    def put(number: int, priority: str = "default") -> None:
        job = SvdJob(image=f"inputs/{'0' * 64}.jpg", name=f"photo {number}", seed=number)
        enqueue(connection, job, f"job-{number}", priority)

    def num_read() -> int:
        found: Any = connection.info("commandstats")
        return int(found["cmdstat_hgetall"]["calls"])

    recent: Recent[Parameters] = Recent()
    for number in range(3):
        put(number)
    assert [job["name"] for job in take(connection, recent).waiting.sample] == ["photo 0", "photo 1", "photo 2"]
    put(3, "high")
    connection.lpop("rq:queue:svdq-default")
    before = num_read()
    assert [job["name"] for job in take(connection, recent).waiting.sample] == ["photo 3", "photo 1", "photo 2"]
    assert num_read() - before == 2  # one is of the pauses
