"""A rank that holds one expert at a time is killed in each phase of its rounds, and while it loads each expert."""

from tests.faults.arena import Arena
from tests.faults.campaigns.kills import LEAST_GAP_S, MOST_GAP_S, PATIENT
from tests.waiting import wait_until

STEPS = 20
#: Phases are named by what they need; of `load-…` it is loaded, and in `write` the files of a video are written.
PHASES = (
    *("load-encoders", "load-simulated", "load-simulated_2"),
    *("encode", "simulated", "simulated_2", "decode", "write"),
)
#: Jobs for each kill in every phase, and for each kill of everything at a random time.
JOBS_A_PASS, JOBS_A_POWER_CUT = 20, 10
LEAST_WAITING = 10  # jobs that have not ended: a kill in a phase strikes at its fourth video, or a later one


def rounds(arena: Arena) -> None:
    """kill -9 in all phases in random order, again and again, and then of everything at any time."""
    num_jobs = arena.size.num_jobs
    arena.options = ("--experts", "rounds", "--ranks", "1")  # whatever the size says
    controls = arena.folder / "rounds"
    controls.mkdir()
    passes = max(1, num_jobs // JOBS_A_PASS)
    phases = [phase for _ in range(passes) for phase in arena.rng.sample(PHASES, len(PHASES))]
    for number, phase in enumerate(phases):
        (controls / f"kill{number:02}.{phase}").touch()
    arena.submit_all(steps=STEPS)
    group, _ = arena.start_with("rounds", **PATIENT)

    def all_are_spent() -> bool:
        for _ in range(LEAST_WAITING - len(arena.jobs) + arena.num_ended()):
            arena.submit(steps=STEPS)
        return not list(controls.glob("kill*"))

    wait_until(all_are_spent, lambda: f"left: {sorted(controls.glob('kill*'))}\n{group.text}", 60.0 * len(phases))
    spent = sorted(path.suffix.removeprefix(".") for path in controls.glob("done-*"))
    arena.tally.num_faults += len(spent)
    arena.tally.notes.append(f"killed in {', '.join(f'{each} {spent.count(each)} x' for each in dict.fromkeys(spent))}")
    for _ in range(num_jobs // JOBS_A_POWER_CUT):
        arena.submit(steps=STEPS)
        arena.submit(steps=STEPS)

        def strike() -> None:
            nonlocal group
            group.kill_all()
            group = arena.start(**PATIENT)

        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(strike)
