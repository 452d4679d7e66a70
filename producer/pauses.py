"""Pauses the queues for all groups, and reads why a group takes no jobs."""

from collections.abc import Sequence

import redis
from redis.client import Pipeline
from rq.suspension import resume as rq_resume
from rq.suspension import suspend as rq_suspend
from rq.worker import Worker

from svdq.producer import keys
from svdq.producer.together import Read, ask_one, checked

SUSPENDED = "Paused: no jobs are taken until `svdq resume`."


def pause(connection: redis.Redis) -> None:
    """Stop all groups from taking jobs."""
    rq_suspend(connection)


def resume(connection: redis.Redis) -> None:
    """Let all groups take jobs again, including groups that paused after too many failures."""
    rq_resume(connection)
    connection.delete(keys.PAUSES)


def read_pauses(connection: redis.Redis) -> Sequence[str]:
    """Read the reasons why no jobs are taken, a sentence each."""
    return ask_one(connection, reading_pauses())


def reading_pauses() -> Read[Sequence[str]]:
    """Read them in a round trip with others: see `together.py`."""

    def put(pipeline: Pipeline) -> None:
        pipeline.exists(keys.SUSPENDED)
        pipeline.hgetall(keys.PAUSES)

    is_suspended, found = checked((yield put))
    prefix = Worker.redis_worker_namespace_prefix.encode()
    alive = (yield lambda pipeline: [pipeline.exists(prefix + worker) for worker in found]) if found else []
    sentences = [SUSPENDED] if is_suspended else []
    for (worker, reason), is_alive in sorted(zip(found.items(), checked(alive), strict=True)):
        # The reason of a dead group is dropped; the next group tries again.
        if worker == keys.BURSTS.encode() or is_alive:
            name, text = (part.decode(errors="backslashreplace") for part in (worker, reason))
            sentences.append(f"PAUSED {name}: {text} Fix the cause, then run `svdq resume`.")
    return sentences
