"""Thousands of jobs under kills of every kind, one after another."""

import time
from collections.abc import Callable
from functools import partial

from tests.faults.arena import Arena
from tests.faults.group import Group

STEPS = 4
#: Seconds between faults.
LEAST_GAP_S, MOST_GAP_S = 2.0, 6.0


def soak(arena: Arena) -> None:
    """Ranks, launcher, everything and Redis die in random order until all jobs have ended."""
    arena.submit_all(steps=STEPS, formats=("gif",))
    group = arena.start()

    def kill(act: Callable[[Group], None]) -> None:
        nonlocal group
        act(group)
        group = group if group.runs else arena.start()

    def server() -> float:
        arena.redis.kill()
        arena.redis.start()
        return time.monotonic()

    kills = [
        partial(kill, act) for act in (lambda group: group.kill_rank(arena.rng), Group.kill_launcher, Group.kill_all)
    ]
    while not arena.all_ended():
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        fault = arena.rng.choice([*kills, server])
        arena.strike(fault, kills=fault is not server)
