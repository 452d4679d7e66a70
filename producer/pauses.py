"""Pauses the queues, frees the GPUs of hosts, and reads why a group takes no jobs."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis
from redis.client import Pipeline
from rq.suspension import resume as rq_resume
from rq.suspension import suspend as rq_suspend
from rq.worker import Worker

from svdq.producer import keys
from svdq.producer.together import Read, ask_one, checked


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Why jobs are not taken."""

    text: str  # a sentence
    host: str | None = None  # the only host that takes none; None: it is not about one host
    by_person: bool = True  # a group pauses itself after failures that are alike

    def __str__(self) -> str:
        return self.text


SUSPENDED = Pause(text="Paused: no jobs are taken until `svdq resume`.")
FREED = Pause(text="Paused: the GPUs are left to other programs until `svdq resume`.")


def pause(connection: redis.Redis) -> None:
    """Stop all groups from taking jobs."""
    rq_suspend(connection)


def free(connection: redis.Redis, host: str | None = None) -> None:
    """Have the launchers of a host, or of all hosts, end their ranks after the present step, until `resume`."""
    if host is None:
        pause(connection)
    connection.hset(keys.PAUSES, freed_field(host), "")


def resume(connection: redis.Redis, host: str | None = None) -> None:
    """End all pauses, also of groups after too many failures; or only that a given host alone was freed."""
    if host is not None:
        connection.hdel(keys.PAUSES, freed_field(host))
        return
    rq_resume(connection)
    connection.delete(keys.PAUSES)


def is_freed(connection: redis.Redis, host: str) -> bool:
    """Return whether the GPUs of a host are to be free."""
    return any(value is not None for value in connection.hmget(keys.PAUSES, [freed_field(None), freed_field(host)]))


def freed_field(host: str | None) -> str:
    """Return the field of `keys.PAUSES` that says that a host, or all hosts, are freed."""
    return f"{keys.FREED}{host or keys.ALL_HOSTS}"


def stop_all(pauses: Sequence[Pause]) -> bool:
    """Return whether jobs are taken on no host."""
    return any(each.host is None for each in pauses)


def read_pauses(connection: redis.Redis) -> Sequence[Pause]:
    """Read the reasons why no jobs are taken."""
    return ask_one(connection, reading_pauses())


def reading_pauses() -> Read[Sequence[Pause]]:
    """Read them in a round trip with others: see `together.py`."""

    def put(pipeline: Pipeline) -> None:
        pipeline.exists(keys.SUSPENDED)
        pipeline.hgetall(keys.PAUSES)

    is_suspended, found = checked((yield put))
    reasons = {
        field.decode(errors="backslashreplace"): text.decode(errors="backslashreplace") for field, text in found.items()
    }
    freed = sorted(field.removeprefix(keys.FREED) for field in reasons if field.startswith(keys.FREED))
    workers = sorted(field for field in reasons if not field.startswith(keys.FREED))
    prefix = Worker.redis_worker_namespace_prefix
    alive = (yield lambda pipeline: [pipeline.exists(prefix + worker) for worker in workers]) if workers else []
    pauses = [SUSPENDED] if is_suspended else []
    if keys.ALL_HOSTS in freed:
        pauses, freed = [FREED], []
    text = "Paused on {}: its GPUs are left to other programs until `svdq resume`."
    pauses += [Pause(text=text.format(host), host=host) for host in freed]
    for worker, is_alive in zip(workers, checked(alive), strict=True):
        # The reason of a dead group is dropped; the next group tries again.
        if worker == keys.BURSTS or is_alive:
            text = f"PAUSED {worker}: {reasons[worker]} Fix the cause, then run `svdq resume`."
            pauses.append(Pause(text=text, by_person=False))
    return pauses
