"""A worker that sleeps between its jobs: it is killed asleep and while it wakes, and Redis goes away meanwhile."""

import time

from svdq.producer.status.ranks import read_groups
from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.waiting import wait_until

STEPS = 24
IDLE = "1s"  # time without a job after which it sleeps
#: Seconds after the end of a job in which the ranks fall asleep, and for which Redis is away.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.5, 3.0
FAULTS = ("none", "falling asleep", "launcher asleep", "launcher waking", "rank", "redis")


def on_demand(arena: Arena) -> None:
    """Each job wakes a sleeping worker, with one kind of fault a job, in random order."""
    arena.options = ("--on-demand", IDLE)
    group = arena.start()
    num_wakes = 0
    faults: list[str] = []
    for _ in range(arena.size.num_jobs):
        if not faults:
            faults = arena.rng.sample(FAULTS, len(FAULTS))
        fault = faults.pop()
        arena.tally.num_faults += fault not in ("none", "falling asleep")
        if fault == "falling asleep":
            time.sleep(arena.rng.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
        else:
            wait_until(lambda each=group: is_asleep(arena, each), lambda each=group: each.text)
            num_wakes += 1
        if fault == "redis":
            arena.redis.kill()
            time.sleep(arena.rng.uniform(LEAST_PAUSE_S, MOST_PAUSE_S))
            arena.redis.start()
        if fault == "launcher asleep":
            group.kill_launcher()
        arena.submit_next(steps=STEPS)
        if fault == "rank":
            group.kill_rank(arena.rng)
        if fault == "launcher waking":
            wait_until(lambda each=group: len(each.family()) > 1, lambda each=group: each.text)
            time.sleep(arena.rng.uniform(0, MOST_PAUSE_S))
            group.kill_all()
        if fault.startswith("launcher"):
            group = arena.start()
        wait_until(arena.all_ended, lambda each=group, what=fault: f"{what}: {each.text}")
    wait_until(lambda: is_asleep(arena, group), lambda: group.text)
    arena.tally.notes.append(f"{num_wakes} wakes; asleep the worker has {_rss_mb(group):.0f} MB")


def is_asleep(arena: Arena, group: Group) -> bool:
    """Whether a worker has no ranks until there is a job."""
    ranks = [rank for each in read_groups(arena.connection) for rank in each.ranks if rank.pid == group.process.pid]
    return bool(ranks) and all(rank.rest is not None and rank.rest.reason == "idle" for rank in ranks)


def _rss_mb(group: Group) -> float:
    return float(group.family()[0].memory_info().rss / 1e6)
