"""Thousands of jobs under kills of every kind, one after another."""

import time
from collections.abc import Callable
from functools import partial

from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.waiting import wait_until

STEPS = 4
#: Jobs that end between faults: seconds would make the number of faults depend on the machine.
LEAST_JOBS, MOST_JOBS = 20, 60
MOST_GAP_S = 1.0  # seconds after the last of those jobs, so that a fault finds others in any phase


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
        enough = min(arena.num_ended() + arena.rng.randint(LEAST_JOBS, MOST_JOBS), len(arena.jobs))
        wait_until(lambda enough=enough: arena.num_ended() >= enough, "jobs end between two faults")
        arena.breathe(0.0, MOST_GAP_S)
        fault = arena.rng.choice([*kills, server])
        arena.strike(fault, kills=fault is not server)
