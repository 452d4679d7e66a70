"""Measures what many jobs cost: bytes of Redis for each, and the time of the commands that look at all of them.

    python -m tests.scale                      1,000,000 queued and 1,000,000 finished jobs: 8 GB, about 10 minutes
    python -m tests.scale --jobs 10000

It starts a Redis server of its own. Jobs are enqueued by the code that `svdq submit` uses; of half of them the records
are then changed to those of finished jobs, as RQ leaves them.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from rq.results import Result

from svdq.producer import keys
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.queue import queue_of
from svdq.producer.status import selection, snapshot
from svdq.producer.status.registries import counts, newest_ids
from svdq.producer.submitting.enqueue import CHUNK, enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.queued import SvdJob

TIMES = 5  # how often each command is timed


def entries(first: int, number: int) -> list[Entry]:
    """Make jobs of different photos."""
    return [
        Entry(
            job=SvdJob(image=f"inputs/{index:064x}.jpg", name=f"photo-{index}", seed=index, formats=("mp4",)),
            job_id=f"{index:020x}",
            photo=f"/photos/of/somebody/photo-{index}.jpg",
        )
        for index in range(first, first + number)
    ]


def finish(connection: redis.Redis, of: list[Entry]) -> None:
    """Change the records of queued jobs to those of finished ones."""
    queue = queue_of(connection, "default")
    registry = queue.finished_job_registry
    now = time.time()
    with connection.pipeline(transaction=False) as pipeline:
        for entry in of:
            key = f"rq:job:{entry.job_id}"
            pipeline.hset(
                key,
                mapping={
                    "status": "finished",
                    "started_at": "2026-01-01T00:00:00.000000Z",
                    "ended_at": "2026-01-01T00:00:20.000000Z",
                    "worker_name": "svdq-machine-0",
                },
            )
            pipeline.expire(key, keys.RESULT_TTL_S)
            outputs = [f"outputs/{entry.job.name}-{entry.job_id}.{suffix}" for suffix in ("mp4", "json")]
            pipeline.xadd(
                Result.get_key(entry.job_id),
                {"type": "1", "created_at": str(now), "return_value": str({"outputs": outputs, "seconds": 20.1})},
            )
            pipeline.expire(Result.get_key(entry.job_id), keys.RESULT_TTL_S)
            pipeline.zadd(registry.key, {entry.job_id: now + keys.RESULT_TTL_S})
        pipeline.delete(queue.key)
        pipeline.execute()


def used(connection: redis.Redis) -> int:
    return int(connection.info("memory")["used_memory"])


@contextmanager
def server() -> Iterator[redis.Redis]:
    with tempfile.TemporaryDirectory(prefix="svdq-scale-") as home:
        connection = redis.Redis.from_url(ensure_server(Path(home)))
        connection.config_set("appendonly", "no")
        connection.config_set("save", "")
        try:
            yield connection
        finally:
            stop_server(Path(home))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="queued jobs, and as many finished ones")
    number = parser.parse_args().jobs
    print(f"{number:,} queued and {number:,} finished jobs; load {os.getloadavg()[0]:.1f}", flush=True)
    with server() as connection:
        empty = used(connection)
        for first in range(0, number, CHUNK):
            chunk = entries(first, min(CHUNK, number - first))
            enqueue_many(connection, chunk)
            finish(connection, chunk)
        finished = used(connection)
        started = time.perf_counter()
        for first in range(number, 2 * number, CHUNK):
            enqueue_many(connection, entries(first, min(CHUNK, 2 * number - first)))
        seconds = time.perf_counter() - started
        queued = used(connection)
        print(f"a finished job: {(finished - empty) / number:,.0f} bytes of Redis")
        print(f"a queued job: {(queued - finished) / number:,.0f} bytes, {seconds / number * 1e6:,.0f} us to enqueue")
        last = f"{2 * number - 1:020x}"
        looks: dict[str, Callable[[], object]] = {
            "svdq status": lambda: snapshot.take(connection),
            "svdq status ID, queued last": lambda: snapshot.estimate(
                connection, list(selection.view_many(connection, [last]))
            ),
            "counts of all statuses": lambda: counts(connection),
            "ids of the newest 1,000": lambda: newest_ids(connection, 1000),
            "first page of 50": lambda: selection.read_page(connection, 50),
        }
        for name, look in looks.items():
            before = connection.info("commandstats")
            times = []
            for _ in range(TIMES):
                started = time.perf_counter()
                look()
                times.append(time.perf_counter() - started)
            after = connection.info("commandstats")
            calls = sum(stats["calls"] - before.get(command, {"calls": 0})["calls"] for command, stats in after.items())
            usec = sum(stats["usec"] - before.get(command, {"usec": 0})["usec"] for command, stats in after.items())
            print(
                f"{name}: {sorted(times)[TIMES // 2] * 1000:,.1f} ms, {calls / TIMES:,.0f} commands, "
                f"{usec / TIMES / 1000:,.1f} ms of Redis",
                flush=True,
            )


if __name__ == "__main__":
    main()
