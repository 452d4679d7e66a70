"""A kill in each of the narrow places between two steps that belong together, and in phases beside the stage loop."""

from tests.faults.arena import Arena
from tests.waiting import wait_until

STEPS = 4
#: Kills in each window, as the jobs allow: each spends two.
MOST_KILLS = 20
JOBS_A_KILL = 2

WINDOWS = (
    "after-pop",
    "after-admission",
    "after-rename",
    "before-acknowledgement",
    "during-prepare",
    "during-encode",
    "during-decode",
    "frames-in-transit",
    "during-write",
)
THREE_RANKS = (
    "during-encode",
    "during-decode",
    "frames-in-transit",
)  # where a rank between the first and last one counts


def window(arena: Arena, where: str) -> None:
    """The rank that comes by kills itself there, now and then; at most one video is rendered again a kill."""
    num_kills = min(MOST_KILLS, arena.size.num_jobs // JOBS_A_KILL)
    controls = arena.folder / where
    controls.mkdir()
    for number in range(num_kills):
        (controls / f"kill{number:02}").touch()
    arena.submit_all(steps=STEPS)
    arena.start_with(where)
    wait_until(lambda: not list(controls.glob("kill*")) or arena.all_ended(), "all kills are spent", 60.0 * num_kills)
    arena.tally.num_faults += num_kills - len(list(controls.glob("kill*")))
    if arena.tally.num_faults < num_kills:
        arena.tally.notes.append(f"all jobs had ended after {arena.tally.num_faults} of {num_kills} kills")
