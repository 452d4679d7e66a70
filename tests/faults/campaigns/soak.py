"""Thousands of jobs under kills of every kind, one after another."""

import time

from tests.faults.arena import Arena

STEPS = 4
#: Seconds between faults.
LEAST_GAP_S, MOST_GAP_S = 2.0, 6.0


def soak(arena: Arena) -> None:
    """Ranks, launcher, everything and Redis die in random order until all jobs have ended."""
    for _ in range(arena.size.num_jobs):
        arena.submit(steps=STEPS, formats=("gif",))
    group = arena.start()

    def one_rank() -> None:
        group.kill_rank(arena.rng)

    def launcher() -> None:
        nonlocal group
        group.kill_launcher()
        group = arena.start()

    def everything() -> None:
        nonlocal group
        group.kill_all()
        group = arena.start()

    def server() -> float:
        arena.redis.kill()
        arena.redis.start()
        return time.monotonic()

    while not arena.all_ended():
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        fault = arena.rng.choice((one_rank, launcher, everything, server))
        arena.strike(fault, kills=fault is not server)
