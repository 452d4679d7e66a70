"""A Redis that dies, is away, is full or does not answer while jobs are in flight."""

import time
from collections.abc import Callable

from svdq.producer.embedded_redis import running_url
from tests.faults.arena import Arena
from tests.waiting import wait_until

STEPS = 24
NUM_KILLS = 10  # times that Redis is killed
#: Seconds between faults, and for which a killed server is away.
LEAST_GAP_S, MOST_GAP_S = 0.5, 2.0
LEAST_AWAY_S, MOST_AWAY_S = 0.2, 2.0
PAUSE_S = 60.0  # seconds for which it does not answer, or is full
GONE_S = 600.0  # seconds for which it is gone


def redis_kill(arena: Arena) -> None:
    """kill -9 of Redis and a start some seconds later, from its append-only file."""

    def strike() -> float:
        arena.redis.kill()
        time.sleep(arena.rng.uniform(LEAST_AWAY_S, MOST_AWAY_S))
        arena.redis.start()
        return time.monotonic()

    _strike(arena, strike, NUM_KILLS)


def redis_embedded(arena: Arena) -> None:
    """kill -9 of the embedded Redis, which nobody but the workers themselves starts again."""

    def strike() -> None:
        arena.redis.kill()
        wait_until(lambda: running_url(arena.settings.home), "the worker starts Redis again")

    _strike(arena, strike, NUM_KILLS, embedded=True)


def redis_pause(arena: Arena) -> None:
    """Redis answers nobody for longer than leases last, then goes on as if nothing had been."""

    def strike() -> float:
        arena.redis.pause(arena.size.hold_s or PAUSE_S)
        return time.monotonic()

    _strike(arena, strike)


def redis_full(arena: Arena) -> None:
    """Redis has no room for longer than leases last: it refuses to renew them, and to take ends and submissions."""

    def strike() -> float:
        arena.connection.config_set("maxmemory", 1)
        time.sleep(arena.size.hold_s or PAUSE_S)
        arena.connection.config_set("maxmemory", 0)
        return time.monotonic()

    _strike(arena, strike)


def redis_gone(arena: Arena) -> None:
    """Redis is stopped in order and stays away for far longer than leases last; then it is started again."""

    def strike() -> float:
        arena.redis.stop()
        time.sleep(arena.size.hold_s or GONE_S)
        arena.redis.start()
        return time.monotonic()

    _strike(arena, strike)


def _strike(arena: Arena, fault: Callable[[], float | None], times: int = 1, *, embedded: bool = False) -> None:
    arena.submit_all(steps=STEPS)
    arena.start(embedded=embedded)
    for _ in range(times):
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(fault, kills=False)
