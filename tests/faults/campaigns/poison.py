"""One photo that kills the rank that prepares it, among many that do not."""

import shutil

from tests.faults.arena import Arena
from tests.faults.group import READY
from tests.faults.plan import Expected

STEPS = 12
POISON = "poison.jpg"  # what the injection takes for the poison, in the folder that controls it
MOST_STARTS = 3  # starts of the group: the first, and one after each of the crashes that it takes to set the job aside


def poisoned_photo(arena: Arena) -> None:
    """The poisoned job fails with the reason after two restarts; all others finish."""
    controls = arena.folder / "poison-prepare"
    controls.mkdir()
    shutil.copy(arena.photo(POISON), controls / POISON)
    position = arena.rng.randrange(arena.size.num_jobs)
    for number in range(arena.size.num_jobs):
        if number == position:
            reason = "died 2 times while it worked on this job"
            arena.submit(steps=STEPS, photo=POISON, expected=Expected(states=("failed",), reason=reason))
        else:
            arena.submit(steps=STEPS)
    group, _ = arena.start_with("poison-prepare")
    arena.settle()
    num_starts = group.text.count(READY)
    arena.tally.num_faults += num_starts - 1
    if num_starts != MOST_STARTS:
        arena.tally.broken.append(f"the group started {num_starts} times, not {MOST_STARTS}")
