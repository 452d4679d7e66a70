"""Two groups on one queue, of which one dies, on this host or another, and one sleeps past its leases."""

import time

from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.waiting import wait_until

STEPS = 12
SLEEP_S = 30.0  # seconds of SIGSTOP: twice a lease
WOKEN_S = 3.0  # seconds that it gets afterwards to publish what it must not
TAKEN_OVER_S = 20.0  # seconds within which another host takes over
JOBS_A_FAULT = 10  # jobs for each host that dies
#: The part of the jobs that is submitted before the first fault; the rest keeps both groups at work in the second.
FIRST_WAVE = 0.5


def two_groups(arena: Arena) -> None:
    """Kill one of two groups: the other takes over. Stop one of two and wake it: it publishes nothing it has lost."""
    doomed, sleeper = arena.start(), arena.start()
    first = int(arena.size.num_jobs * FIRST_WAVE)
    for _ in range(first):
        arena.submit(steps=STEPS)
    wait_until(lambda: _holds(arena, _rank_0(doomed)), "the one to be killed has jobs")
    arena.strike(doomed.kill_all, kills=True)

    helper = arena.start()
    for _ in range(arena.size.num_jobs - first):
        arena.submit(steps=STEPS)
    held = [sleeper, helper]
    arena.rng.shuffle(held)
    wait_until(lambda: _holds(arena, _rank_0(held[0])), "the one to be stopped has jobs")

    def strike() -> None:
        held[0].pause()
        time.sleep(arena.size.hold_s or SLEEP_S)
        held[0].wake()
        time.sleep(WOKEN_S)

    arena.strike(strike, kills=False)


def two_hosts(arena: Arena) -> None:
    """Kill everything on one of two hosts, again and again: the other takes over when leases have run out."""
    if not arena.may_name_hosts():
        return
    hosts = [arena.start(host="host0"), arena.start(host="host1")]
    for number in range(max(1, arena.size.num_jobs // JOBS_A_FAULT)):
        for _ in range(JOBS_A_FAULT):
            arena.submit(steps=STEPS)
        doomed = hosts[0]
        wait_until(lambda doomed=doomed: _holds(arena, _rank_0(doomed)), "the host to be killed has jobs")
        arena.strike(doomed.kill_all)
        # Only now: it is the other one that takes over.
        hosts = [hosts[1], arena.start(host=f"host{number + 2}")]
    if (longest_s := max(arena.tally.recoveries_s, default=0.0)) > TAKEN_OVER_S:
        arena.tally.broken.append(f"another host took over after {longest_s:.1f} s only")


def _rank_0(group: Group) -> int:
    return group.ranks()[0].pid


def _holds(arena: Arena, pid: int) -> bool:
    """Whether the group of a rank 0 has jobs in flight; its worker's name carries the process id."""
    return any(status == "started" and f"-{pid}-" in worker for status, worker in arena.states().values())
