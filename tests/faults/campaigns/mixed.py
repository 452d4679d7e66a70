"""Jobs that are no good among many that are: each of four kinds once in twenty."""

import time
from random import Random

from svdq.pipeline.errors import InputError
from svdq.producer.job_control import cancel
from tests.faults.arena import Arena
from tests.faults.plan import FINISHED, Expected

STEPS = 12
BLOCK = 20  # of so many jobs one is of each kind
#: Seeds of jobs that the injection turns into what they are named after.
KILL_SEED, NAN_SEED = 66_600_666, 77_700_777
#: Seconds after which a job may be canceled, at most: a start and so much a job, when it may be anywhere.
START_S, EACH_S = 5.0, 0.3

POISON = Expected(states=("failed",), reason="died")
NAN = Expected(states=("failed",), reason="step")
CORRUPT = Expected(states=("failed",), reason="damaged")
CANCELED = Expected(states=("finished", "stopped", "canceled"))


def mixed(arena: Arena) -> None:
    """Poison that kills its rank, NaN, damaged photos and jobs canceled at a random moment; all others finish."""
    cancels = []
    began_at = time.monotonic()
    latest_s = START_S + EACH_S * arena.size.num_jobs
    for role in _roles(arena.size.num_jobs, arena.rng):
        match role:
            case "poison":
                arena.submit(steps=STEPS, seed=KILL_SEED, expected=POISON)
            case "nan":
                arena.submit(steps=STEPS, seed=NAN_SEED, expected=NAN)
            case "corrupt":
                _submit_corrupt(arena)
            case "canceled":
                job_id = arena.submit(steps=STEPS, expected=CANCELED)
                cancels.append((began_at + arena.rng.uniform(0, latest_s), job_id))
            case _:
                arena.submit_next(steps=STEPS)
        arena.tally.num_faults += role != "good"
    # A step is as long as a small one on a GPU.
    arena.start_with("seeds", FAULTS_SEEDS=f"kill={KILL_SEED},nan={NAN_SEED}")
    for moment, job_id in sorted(cancels):
        time.sleep(max(0.0, moment - time.monotonic()))
        _cancel(arena, job_id)


def _roles(num_jobs: int, rng: Random) -> list[str]:
    """Give every job its role; each of the four bad ones is once in every block, anywhere."""
    roles: list[str] = []
    while len(roles) < num_jobs:
        block = ["poison", "nan", "corrupt", "canceled"] + ["good"] * (min(BLOCK, num_jobs - len(roles)) - 4)
        rng.shuffle(block)
        roles += block
    return roles[:num_jobs]


def _submit_corrupt(arena: Arena) -> None:
    """Submit a photo that is whole, and damage it where it is stored."""
    name = f"corrupt{len(arena.jobs)}.jpg"
    arena.photo(name)
    job_id = arena.submit(steps=STEPS, photo=name, expected=CORRUPT)
    stored = arena.storage / arena.job_of(job_id).image
    stored.write_bytes(stored.read_bytes()[:300])


def _cancel(arena: Arena, job_id: str) -> None:
    try:
        done = cancel(arena.connection, job_id)
    except InputError:
        arena.jobs[job_id] = FINISHED  # it was faster
        return
    # One in flight stops at its next step, unless it had none left.
    arena.jobs[job_id] = Expected(states=("canceled",) if done == "canceled" else ("stopped", "finished"))
