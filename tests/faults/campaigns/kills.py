"""Processes that die or are told to end while jobs are in flight."""

import signal
import time
from collections.abc import Callable

from tests.faults.arena import Arena

STEPS = 20  # denoising steps of a job; long enough that a fault finds several in flight
#: Seconds between the recovery from one fault and the next.
LEAST_GAP_S, MOST_GAP_S = 0.5, 3.0
JOBS_A_FAULT = 4  # jobs for each fault: beyond that the rest is left in peace, so that a small campaign is short
#: Variables of workers whose ranks are killed every few seconds. Two kills in a row that strike a job in the same one
#: of its 20 steps are then no rarity, and svdq takes them for the job's fault; three in a row are rare.
PATIENT = {"SVDQ_MAX_ATTEMPTS": "3"}
#: The part of kills of a rank that strike while the group is still recovering from the one before.
DURING_RECOVERY = 0.25


def kill_rank(arena: Arena) -> None:
    """kill -9 of a random rank, again and again; torchrun starts the group anew."""
    _submit(arena)
    group = arena.start(**PATIENT)

    def strike() -> None:
        group.kill_rank(arena.rng)
        if arena.rng.random() < DURING_RECOVERY:
            time.sleep(arena.rng.uniform(0, MOST_GAP_S))
            group.kill_rank(arena.rng)
            arena.tally.num_faults += 1

    again_and_again(arena, strike)


def kill_launcher(arena: Arena) -> None:
    """kill -9 of the launcher, which takes the group with it; someone starts it again."""
    _submit(arena)
    group = arena.start()

    def strike() -> None:
        nonlocal group
        group.kill_launcher()
        group = arena.start()

    again_and_again(arena, strike)


def sigterm(arena: Arena) -> None:
    """SIGTERM in the middle of videos, as a reboot does; someone starts the worker again."""
    _submit(arena)
    group = arena.start()

    def strike() -> None:
        nonlocal group
        arena.stop(group, signal.SIGTERM)
        group = arena.start()

    again_and_again(arena, strike)


def kill_all(arena: Arena) -> None:
    """kill -9 of every process at once, as in a power cut; someone starts the worker again."""
    _submit(arena)
    group = arena.start()

    def strike() -> None:
        nonlocal group
        group.kill_all()
        group = arena.start()

    again_and_again(arena, strike)


def _submit(arena: Arena) -> None:
    for _ in range(arena.size.num_jobs):
        arena.submit(steps=STEPS)


def again_and_again(arena: Arena, fault: Callable[[], None]) -> None:
    """Inject a fault every few seconds, once for each four jobs."""
    while not arena.all_ended() and arena.tally.num_faults < arena.size.num_jobs // JOBS_A_FAULT:
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(fault)
