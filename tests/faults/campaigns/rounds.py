"""A rank that holds one expert at a time is killed in each phase of its rounds, and while it loads."""

import itertools

from tests.faults.arena import Arena
from tests.faults.campaigns.kills import LEAST_GAP_S, MOST_GAP_S, PATIENT
from tests.waiting import wait_until

STEPS = 20
PHASES = ("load", "encode", "simulated", "simulated_2", "decode")
#: Jobs for each kill in a phase, and for each kill of everything at a random time.
JOBS_A_KILL, JOBS_A_POWER_CUT = 2, 10


def rounds(arena: Arena) -> None:
    """kill -9 in each phase in turn, and then of everything at any time."""
    num_jobs = arena.size.num_jobs
    arena.options = ("--experts", "rounds")
    controls = arena.folder / "rounds"
    controls.mkdir()
    num_kills = num_jobs // JOBS_A_KILL
    for number, phase in zip(range(num_kills), itertools.cycle(PHASES), strict=False):
        (controls / f"kill{number:02}-{phase}").touch()
    for _ in range(num_jobs):
        arena.submit(steps=STEPS)
    group, _ = arena.start_with("rounds", **PATIENT)
    wait_until(lambda: not list(controls.glob("kill*")) or arena.all_ended(), "all kills are spent", 60.0 * num_kills)
    spent = {path.name.rpartition("-")[2] for path in controls.glob("done-*")}
    arena.tally.num_faults += num_kills - len(list(controls.glob("kill*")))
    if missing := {*PHASES[:num_kills]} - spent:
        arena.tally.notes.append(f"all jobs had ended before a kill in {', '.join(sorted(missing))}")
    for _ in range(num_jobs // JOBS_A_POWER_CUT):
        arena.submit(steps=STEPS)
        arena.submit(steps=STEPS)

        def strike() -> None:
            nonlocal group
            group.kill_all()
            group = arena.start(**PATIENT)

        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(strike)
